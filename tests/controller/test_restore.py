"""Restoring: all or nothing, read-only, and the same state again."""

import asyncio

import pytest

from gpu_workers.controller.restorer import RestorePlan
from storage.errors import (
    BrokenInvariant,
    DatasetChanged,
    InfrastructureFailure,
    MidflightError,
    RestoreRefused,
    StoreUnavailable,
)
from storage.manifests import decode_manifest, encode_manifest

LINKS = ("weights", "replay_buffer", "ledger", "spare_prompts", "cursor")


async def _killed_in_the_middle(make_world, **sections):
    """Step 1 is durable; a snapshot holds 4 finished groups and 4 half-finished ones; the run is dead."""
    world = make_world(**sections)
    world.boot()
    half = set(world.passed_by(40)) - set(world.passed_by(12))
    world.generator.held = lambda group_id, index: index == 1 and group_id in half
    controller = await world.restore(world.plan())
    await controller.train_steps(1, 1)
    await world.settle(lambda: len(controller.parts.buffer) >= 4 and controller.describe()["sealed_siblings"] > 0)
    bundle = await world.snapshot(1)
    await world.kill()
    return world, bundle


def _is_empty(controller):
    state = controller.parts.state
    described = controller.describe()
    counts = [described[name] for name in ("ledger_groups", "buffered_groups", "running_groups", "train_steps")]
    cursor = (controller.parts.sampler.cursor, controller.parts.source.position.offset)
    return counts == [0] * 4 and cursor == (-1, 0) and not state.spares and not state.dropped and not state.shortfall


async def test_a_restore_puts_back_exactly_what_was_saved(make_world):
    world, bundle = await _killed_in_the_middle(make_world)
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    parts = controller.parts
    assert tuple(parts.buffer.ready()) == bundle.state.buffer
    assert tuple(parts.state.spares) == bundle.state.spares
    assert len(bundle.state.spares) == 4
    assert parts.source.position == bundle.state.progress.source
    assert (
        world.trainer.weights
        == world.store.read(
            next(e.path for e in world.bundles.manifest(world.plan().anchor).files if e.role == "weights")
        ).decode()
    )
    facts = world.trace.of("checkpoint_restored")[0]
    assert facts["groups_buffered"] == len(bundle.state.buffer)
    assert facts["siblings_reused"] == sum(s.sealed is not None for g in bundle.state.ledger for s in g.siblings) > 0
    await world.kill()


async def test_invariant_9_a_restore_changes_nothing_in_the_store(make_world):
    world, _ = await _killed_in_the_middle(make_world)
    world.boot()
    before = {path: world.store.read(path) for path in world.store.list("run")}
    changes = world.store.changes()
    await world.restore(world.plan())
    assert world.store.changes() == changes
    assert {path: world.store.read(path) for path in world.store.list("run")} == before
    await world.kill()


async def test_scenario_50_restored_capacity_is_released_by_a_live_pump(make_world):
    world, _ = await _killed_in_the_middle(make_world)
    controller = await world.start()
    reports = await world.train(2, 6)
    assert [len(r["group_ids"]) for r in reports] == [4] * 5
    await world.settle(lambda: controller.describe()["running_groups"] == 0)
    assert len(controller.parts.buffer) == world.config.buffer_capacity
    await world.kill()


@pytest.mark.parametrize("saved", [True, False])
async def test_scenario_51_and_52_discarded_groups_are_generated_again_and_the_spare_pool_is_restored(
    make_world, saved
):
    """`load_replay_buffer: false` at the restore, or `save_data_plane: false` before it."""
    world, bundle = await _killed_in_the_middle(make_world, checkpointing={"save_data_plane": saved})
    if saved:
        world.change("checkpointing", load_replay_buffer=False)
    else:
        world.change("checkpointing", restore_mode="trainer_checkpoint")
        bundle = world.bundles.read(world.plan().target)
        assert bundle.rows == {}
    controller = await world.start()
    assert len(controller.parts.buffer) == 0
    assert tuple(controller.parts.state.spares) == bundle.state.spares
    promised = {g.group_id: g.target_step for g in (*bundle.state.buffer, *bundle.state.ledger)}
    assert {g.group_id: g.target_step for g in controller.parts.ledger.groups()} == promised
    expected = world.passed_by(16)[8:12]
    reports = await world.train(2, 4)
    assert reports[0]["group_ids"] == expected
    retried = {e["attempt"] for e in world.trace.of("attempt_dispatched") if e["rollout_id"][:-3] in expected}
    assert retried == {1}
    await world.kill()


@pytest.mark.parametrize("changed", [True, False])
async def test_scenario_53_a_swapped_or_shortened_dataset_is_refused_and_named(make_world, changed):
    world, bundle = await _killed_in_the_middle(make_world)
    prompt = bundle.state.ledger[-1].prompt
    whole = world.dataset
    if changed:
        world.dataset = type(whole)(40, changed=frozenset({prompt.prompt_id}))
        named = f"prompt {prompt.prompt_id} has content hash .*, the snapshot saved {prompt.content_hash[:12]}"
    else:
        world.dataset = type(whole)(3)
        named = "is not in the dataset, which has 3 prompts"
    with pytest.raises(DatasetChanged, match=named):
        await world.start()
    assert _is_empty(world.controller)
    world.dataset = whole
    await world.start()
    await world.train(2, 3)
    await world.kill()


async def test_scenario_54_restoring_twice_gives_equal_state_and_an_equal_logical_digest(make_world):
    world, bundle = await _killed_in_the_middle(make_world)
    ledgers, digests = [], []
    for _ in range(2):
        world.boot()
        world.generator.held = lambda group_id, index: True
        plan = RestorePlan(bundle.manifest.sequence, bundle.manifest.anchor.sequence)
        controller = await world.restore(plan)
        ledgers.append(controller.parts.ledger.groups())
        outcome = await controller.attempt_snapshot(1)  # its cut comes before the pump's first turn
        digests.append(world.bundles.manifest(outcome.sequence).logical_digest)
        await world.kill()
    assert ledgers[0] == ledgers[1]
    assert digests[0] == digests[1]
    assert {g.group_id for g in ledgers[0]} == {g.group_id for g in bundle.state.ledger}


async def test_scenario_54_a_snapshot_right_after_a_restore_has_the_logical_digest_of_the_restored_one(make_world):
    world = make_world(async_rl={"spare_prompts": 0})
    controller = await world.start()
    await controller.train_steps(1, 1)
    await world.settle(lambda: len(controller.parts.buffer) == 8 and len(controller.parts.ledger) == 4)
    saved = (await world.snapshot(1)).manifest
    await world.kill()
    await world.start()
    again = (await world.snapshot(1)).manifest
    assert again.logical_digest == saved.logical_digest
    assert {e.path for e in again.files if e.role == "part"} == {e.path for e in saved.files if e.role == "part"}
    await world.kill()


@pytest.mark.parametrize("link", range(1, 6))
async def test_scenario_55_a_crash_during_a_restore_leaves_everything_for_the_next_one(make_world, link):
    world, bundle = await _killed_in_the_middle(make_world)
    controller = world.boot()
    for name in LINKS[:link]:
        await controller.restore_link(name, world.plan())
    await world.kill()
    controller = await world.start()
    assert tuple(controller.parts.buffer.ready())[: len(bundle.state.buffer)] == bundle.state.buffer
    await world.train(2, 3)
    await world.kill()


@pytest.mark.parametrize("failing", ["read", "refit", "weights"])
async def test_a_failed_restore_leaves_an_empty_controller_that_can_restore_again(make_world, failing):
    world, bundle = await _killed_in_the_middle(make_world)
    controller, plan = world.boot(), world.plan()
    if failing == "read":
        world.store.fail("read", "/parts/", StoreUnavailable("down"))
    elif failing == "refit":
        world.generator.refit_failures = [InfrastructureFailure("engine 0 is gone")]
    else:
        world.store.fail("read", "/checkpoints/", StoreUnavailable("down"))
    with pytest.raises(MidflightError):
        await controller.restore(plan)
    assert controller.state == "empty"
    assert _is_empty(controller)
    assert world.generator.orders == []
    assert world.trace.of("checkpoint_restored") == world.trace.of("attempt_abandoned") == []
    await world.restore(plan)
    assert controller.parts.sampler.cursor >= bundle.state.progress.sampler_cursor
    await world.train(2, 3)
    await world.kill()


@pytest.mark.parametrize("failing", LINKS)
async def test_a_link_that_is_applied_and_fails_three_times_in_a_row_leaves_nothing_that_a_good_one_would_not(
    make_world, monkeypatch, failing
):
    world, _ = await _killed_in_the_middle(make_world)
    digests = []
    for failures in (0, 3):
        controller, plan = world.boot(), world.plan()
        world.generator.held = lambda group_id, index: True
        apply, lost = controller._restorer._links[failing], [StoreUnavailable("no answer")] * failures

        async def apply_and_fail(bundle, plan, apply=apply, lost=lost):
            reply = await apply(bundle, plan)
            if lost:
                raise lost.pop()
            return reply

        monkeypatch.setitem(controller._restorer._links, failing, apply_and_fail)
        for link in LINKS:
            for _ in range(failures if link == failing else 0):
                with pytest.raises(StoreUnavailable):
                    await controller.restore_link(link, plan)
            await controller.restore_link(link, plan)
            assert world.generator.orders == [], "nothing runs before the last link"
        await controller.restore_link("redispatch", plan)
        outcome = await controller.attempt_snapshot(1, force=True)  # its cut comes before the pump's first turn
        digests.append(world.bundles.manifest(outcome.sequence).logical_digest)
        await world.kill()
    assert digests[0] == digests[1]


async def test_scenario_56_crash_resume_crash_again_before_any_step_resume(make_world):
    world, _ = await _killed_in_the_middle(make_world)
    for number in (1, 2, 3):
        world.boot()
        world.generator.held = lambda group_id, index: index == 1
        await world.restore(world.plan())
        await world.settle(lambda: len(world.generator.orders) == 4)
        if number == 2:
            await world.snapshot(1, force=True)
        await world.kill()
    await world.start()
    await world.train(2, 8)
    trained = [g for step in sorted(world.history()) for g in world.history()[step]]
    assert len(trained) == len(set(trained)) == 32
    await world.kill()


async def test_scenario_57_a_step_whose_batch_was_complete_is_trained_without_generating_anything(make_world):
    world, bundle = await _killed_in_the_middle(make_world)
    complete = [g.group_id for g in bundle.state.buffer if g.target_step == 1]
    assert len(complete) == 4
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    reports = await controller.train_steps(2, 2)
    assert reports[0]["group_ids"] == complete
    assert world.generator.generated == []
    await world.kill()


async def test_links_out_of_order_or_of_different_plans_start_nothing(make_world):
    world, bundle = await _killed_in_the_middle(make_world)
    controller, plan = world.boot(), world.plan()
    with pytest.raises(BrokenInvariant, match="needs the links weights, replay_buffer before it; applied are none"):
        await controller.restore_link("ledger", plan)
    for name in LINKS:
        await controller.restore_link(name, plan)
    older = RestorePlan(bundle.manifest.anchor.sequence, bundle.manifest.anchor.sequence)
    with pytest.raises(BrokenInvariant, match="start the restore chain again"):
        await controller.restore_link("redispatch", older)
    await controller.restore_link("replay_buffer", plan)
    with pytest.raises(BrokenInvariant, match="applied are weights, replay_buffer"):
        await controller.restore_link("redispatch", plan)
    assert (controller.state, world.generator.orders) == ("restoring", [])
    for name in LINKS[2:]:
        await controller.restore_link(name, plan)
    reply = await controller.restore_link("redispatch", plan)
    assert reply == await controller.restore_link("redispatch", plan)
    world.lives.append((1, world.trace))
    with pytest.raises(BrokenInvariant, match="needs an empty one"):
        await controller.restore_link("weights", plan)
    with pytest.raises(BrokenInvariant, match="needs an empty one"):
        await controller.restore(plan)
    await world.train(2, 3)
    await world.kill()


async def test_invariant_7_a_plan_that_pairs_a_snapshot_with_other_weights_is_refused(make_world):
    world = make_world()
    controller = await world.start()
    await controller.train_steps(1, 1)
    first = world.plan().anchor
    await controller.train_steps(2, 2)
    target = (await world.snapshot(1)).manifest.sequence
    await world.kill()
    for plan in (RestorePlan(target, first), RestorePlan(target, None), RestorePlan(None, first)):
        controller = world.boot()
        with pytest.raises(BrokenInvariant, match="select again"):
            await controller.restore(plan)
        assert _is_empty(controller)


async def test_a_snapshot_on_the_initial_model_is_refused_under_another_configuration(make_world):
    world = make_world()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    await world.snapshot(1)
    await world.kill()
    world.change("generation", max_inflight_groups=16)  # an operational key
    await world.start()
    await world.kill()
    world.change("generation", temperature=0.5)
    with pytest.raises(RestoreRefused, match="generation.temperature: saved 1.0, now 0.5"):
        await world.start()


async def test_a_snapshot_of_an_earlier_version_lacks_keys_which_have_their_defaults(make_world):
    world = make_world()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    sequence = (await world.snapshot(1)).manifest.sequence
    await world.kill()
    path = world.layout.manifest(sequence)
    manifest = decode_manifest(world.store.read(path), path)
    generation = {key: value for key, value in manifest.config["generation"].items() if key != "top_p"}
    config = {key: value for key, value in manifest.config.items() if key != "rollout_recovery"}
    world.store.write(
        path, encode_manifest(manifest.model_copy(update={"config": {**config, "generation": generation}}))
    )
    controller = await world.start()
    assert len(controller.parts.buffer) == 8
    await world.kill()
    world.change("generation", top_p=0.9)
    with pytest.raises(RestoreRefused, match="generation.top_p: saved 1.0, now 0.9"):
        await world.start()


async def test_a_controller_that_is_closed_during_its_last_link_does_not_start(make_world):
    world, _ = await _killed_in_the_middle(make_world)
    controller, plan = world.boot(), world.plan()
    for name in LINKS:
        await controller.restore_link(name, plan)
    reading = world.store.hold("read", "/manifests/")
    link = asyncio.create_task(controller.restore_link("redispatch", plan))
    await world.settle(reading.reached.is_set)
    await world.kill()
    reading.release()
    with pytest.raises(BrokenInvariant, match="controller that is ended"):
        await link
    assert (controller.state, world.generator.orders) == ("ended", [])


async def test_two_restores_at_once_run_their_links_one_after_the_other(make_world):
    world, _ = await _killed_in_the_middle(make_world)
    controller, plan = world.boot(), world.plan()
    links = [asyncio.create_task(controller.restore_link("weights", plan)) for _ in range(2)]
    assert await links[0] == await links[1]
    for name in (*LINKS[1:], "redispatch"):
        await controller.restore_link(name, plan)
    world.lives.append((1, world.trace))
    await world.train(2, 2)
    await world.kill()
