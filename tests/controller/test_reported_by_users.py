"""What users of such systems reported, each as a test; the letter is the report's."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_workers.controller.ports import Failure
from storage.errors import NoRestorableState, SnapshotCorrupt, StoreUnavailable
from storage.layout import RunLayout
from storage.manifests import decode_manifest
from storage.records import RowKind
from storage.schemas import row_digest

ROOT = Path(__file__).resolve().parents[2]
DATA = Failure(infrastructure=False, message="the answer can't be scored")


def _trained(world):
    return [group for step in sorted(world.history()) for group in world.history()[step]]


async def _snapshot_and_kill(world, ready):
    await world.settle(ready)
    await world.snapshot(1, force=True)
    await world.kill()


async def test_a_prompts_that_are_slow_to_finish_are_not_skipped_over_restarts(make_world):
    """Every third prompt is never finished before the kill: the ones that a cursor would have left behind."""
    world = make_world(algorithm={"max_steps": 20}, async_rl={"spare_prompts": 0})
    slow = set(world.passed_by(40)[::3])
    for _ in range(5):
        controller = world.boot()
        world.generator.held = lambda group_id, index: group_id in slow
        await world.restore(world.plan())
        await _snapshot_and_kill(world, lambda: len(world.generator.orders) - len(slow & _finished(world)) >= 2)
        controller = await world.start()
        first = controller.parts.state.train_steps + 1
        await world.train(first, first)
        await world.kill()
    await world.start()
    await world.controller.train_steps(6, 20)
    assert _trained(world) == world.passed_by(40)
    await world.kill()


def _finished(world):
    return {e["group_id"] for e in world.trace.of("group_published")}


async def test_b_the_tail_of_a_fetched_batch_is_owned_and_saved_when_a_step_needs_less(make_world):
    world = make_world(data={"num_prompts": 10}, algorithm={"max_steps": 9}, async_rl={"spare_prompts": 0})
    world.boot()
    tail = world.passed_by(10)[8:]
    world.generator.held = lambda group_id, index: group_id in tail
    controller = await world.restore(world.plan())
    await controller.train_steps(1, 2)
    await world.settle(lambda: {order.group_id for order in world.generator.orders} >= set(tail))
    bundle = await world.snapshot(1)
    assert [g.group_id for g in bundle.state.ledger] == tail
    await world.kill()
    controller = await world.start()
    reports = await controller.train_steps(3, 9)
    assert reports[0]["group_ids"] == tail
    await world.kill()


async def test_c_a_position_is_not_a_count_of_what_was_consumed(make_world):
    """Prompts that failed for good were consumed by nobody; the position moves past them all the same, once."""
    world = make_world(algorithm={"max_steps": 20}, async_rl={"on_dropped_prompt": "shrink", "max_data_failures": 0})
    order = world.passed_by(40)
    failing = order[1:40:6]
    for last in (2, 4, 6):
        world.boot()
        world.generator.failures = {f"{group_id}_g1": [DATA] for group_id in failing}
        controller = await world.restore(world.plan())
        await world.train(controller.parts.state.train_steps + 1, last)
        await world.snapshot(1, force=True)
        await world.kill()
    world.boot()
    world.generator.failures = {f"{group_id}_g1": [DATA] for group_id in failing}
    controller = await world.restore(world.plan())
    await controller.train_steps(7, 20)
    assert _trained(world) == [group_id for group_id in order if group_id not in failing]
    assert [d.prompt.group_id for d in controller.parts.state.dropped] == failing
    await world.kill()


async def test_d_ready_groups_are_restored_under_a_stamping_sampler(make_world):
    world = make_world()
    controller = await world.start()
    await _snapshot_and_kill(world, lambda: len(controller.parts.buffer) == 8)
    controller = await world.start()
    assert controller.parts.state.stamps is True
    assert len(controller.parts.buffer) == 8
    await world.train(1, 1)
    assert not set(world.generator.generated) & {f"{g}_g{i}" for g in world.passed_by(4) for i in range(2)}
    await world.kill()


async def test_e_a_row_is_known_by_its_id_and_attempt_and_never_carries_another_samples_tokens(make_world):
    """Rows come and go and attempts are repeated over three restarts; each trained row is its own prompt's."""
    world = make_world(algorithm={"max_steps": 12})
    order = world.passed_by(40)
    digests = {}
    for last in (2, 4, 6):
        world.boot()
        world.generator.failures = {f"{group_id}_g0": [DATA] for group_id in order[::5]}
        world.generator.held = lambda group_id, index: index == 1 and group_id in order[3::4]
        await world.restore(world.plan())
        await _snapshot_and_kill(world, lambda: world.controller.describe()["sealed_siblings"] > 0)
        controller = await world.start()
        for handle in controller.parts.rows.rows(r for g in controller.parts.buffer.ready() for r in g.row_ids):
            row = handle.batch.slice(handle.index, 1).to_pylist()[0]
            assert row["row_id"] == f"e{row['epoch']}-p{row['prompt_id']}_g{row['generation_index']}"
            assert row["token_ids"][2] == row["prompt_id"] % 50
            assert row_digest(RowKind.TRAINING_ROW, row) == handle.digest
            assert digests.setdefault(row["row_id"], handle.digest) == handle.digest
        await world.train(controller.parts.state.train_steps + 1, last)
        await world.kill()
    sealed = {}
    for _, trace in world.lives:
        for event in trace.of("attempt_sealed"):
            tokens = sealed.setdefault(event["rollout_id"], event["num_tokens"])
            assert tokens == event["num_tokens"]


async def test_f_an_exhausted_source_stays_exhausted_and_its_remainder_is_kept(make_world):
    world = make_world(data={"num_prompts": 9}, algorithm={"max_steps": 9}, async_rl={"on_dropped_prompt": "shrink"})
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    await controller.train_steps(1, 1)
    await _snapshot_and_kill(world, lambda: controller.parts.source.exhausted and len(controller.parts.buffer) == 5)
    controller = await world.start()
    reports = await controller.train_steps(2, 9)
    assert [len(r.get("group_ids", ())) for r in reports] == [4, 1, 0]
    assert _trained(world) == world.passed_by(9)
    assert world.generator.generated == []
    await world.kill()


async def test_g_a_resume_does_not_generate_anything_only_to_throw_it_away(make_world):
    world = make_world(algorithm={"max_steps": 6})
    controller = await world.start()
    await world.train(1, 4)
    await _snapshot_and_kill(world, lambda: len(controller.parts.buffer) == 8)
    controller = await world.start()
    await world.train(5, 6)
    done = {f"{group}_g{index}" for step in range(1, 7) for group in world.history()[step] for index in range(2)}
    assert not set(world.generator.generated) & done
    await world.kill()


@pytest.mark.parametrize("lost", ["progress", "ledger", "replay_index", "spare_prompts", "rows", "dropped", "trained"])
async def test_h_a_missing_sidecar_is_an_error_and_never_a_start_at_zero(make_world, lost):
    world = make_world()
    controller = await world.start()
    await _snapshot_and_kill(world, lambda: len(controller.parts.buffer) == 8)
    slot = world.store.list(RunLayout("run").manifests)[-1]
    manifest = decode_manifest(world.store.read(slot), slot)
    path = next(entry.path for entry in manifest.files if entry.kind == lost)
    plan = world.plan()
    world.store.delete(path)
    with pytest.raises(NoRestorableState, match=f"{path}: missing"):
        await world.start()
    with pytest.raises(SnapshotCorrupt, match=f"{path}: missing"):
        await world.controller.restore(plan)
    assert world.controller.state == "empty"
    assert (world.generator.orders, world.trainer.weights) == ([], "initial")


@pytest.mark.parametrize("stopped_at", ["model", "state", "manifest"])
async def test_i_the_latest_checkpoint_is_the_latest_durable_one(make_world, stopped_at):
    world = make_world()
    controller = await world.start()
    await controller.train_steps(1, 1)
    weights, plan = world.trainer.weights, world.plan()
    if stopped_at == "model":
        world.trainer.save_gate = asyncio.Event()
        reached = lambda: world.trainer.waiting_at == "save"  # noqa: E731
    else:
        operation = "write" if stopped_at == "state" else "create_exclusive"
        hold = world.store.hold(operation, f"/{stopped_at}")
        reached = hold.reached.is_set
    step = asyncio.create_task(controller.train_steps(2, 2))
    await world.settle(reached)
    assert controller.parts.state.train_steps == 2
    assert world.plan() == plan
    trainer, bundles = world.trainer, world.bundles
    await world.kill()
    controller = await world.start()
    assert (controller.parts.state.train_steps, world.trainer.weights) == (1, weights)
    if stopped_at == "model":
        trainer.save_gate.set()
    else:
        hold.release()
    with pytest.raises(Exception, match="closed|fenced"):
        await step
    assert bundles is not world.bundles
    assert world.plan().anchor == plan.anchor
    await world.train(2, 3)
    assert _trained(world)[:4] == world.passed_by(4)
    await world.kill()


async def test_k_an_upload_that_fails_or_hangs_fails_alone_and_training_goes_on(make_world):
    world = make_world(checkpointing={"save_period": 9}, algorithm={"max_steps": 9})
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    world.store.fail("write", "/state/ledger", StoreUnavailable("write run/state/ledger: no answer within 60 s"))
    with pytest.raises(StoreUnavailable, match="run/state/ledger: no answer within 60 s"):
        await controller.attempt_snapshot(1)
    upload = world.store.hold("write", "/state/")
    attempt = asyncio.create_task(controller.attempt_snapshot(2))
    await world.settle(upload.reached.is_set)
    reports = await world.train(1, 3)
    assert [report["step"] for report in reports] == [1, 2, 3]
    assert not attempt.done()
    upload.release()
    assert (await attempt).outcome == "completed"
    assert [e["outcome"] for e in world.trace.of("snapshot_attempt")] == ["failed", "completed"]
    assert controller.state == "running"
    await world.kill()


async def test_l_a_long_save_stops_no_rollout_whose_deadline_would_run_meanwhile(make_world):
    world = make_world()
    world.boot()
    world.generator.held = lambda group_id, index: index == 1
    controller = await world.restore(world.plan())
    await world.settle(lambda: controller.describe()["sealed_siblings"] == 8)
    upload = world.store.hold("write", "/state/")
    attempt = asyncio.create_task(controller.attempt_snapshot(1))
    await world.settle(upload.reached.is_set)
    world.generator.release()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    assert not attempt.done()
    upload.release()
    assert (await attempt).outcome == "completed"
    assert world.trace.of("attempt_abandoned") == []
    await world.kill()


def test_n_every_part_is_wired_into_the_controller_and_not_only_into_its_own_test():
    program = (
        "import sys, gpu_workers.controller_actor; print(*(m for m in sys.modules if m.startswith('gpu_workers')))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    parts = (ROOT / "gpu_workers/controller").glob("*.py")
    names = {f"gpu_workers.controller.{part.stem}" for part in parts if part.stem != "__init__"}
    assert names
    assert names - set(loaded.stdout.split()) == set()


async def test_p_the_first_batch_after_a_resume_at_an_exact_epoch_boundary_is_trained(make_world):
    world = make_world(
        data={"num_prompts": 8, "num_epochs": 2},
        algorithm={"max_steps": 4},
        async_rl={"max_lookahead_versions": 0, "spare_prompts": 0},
    )
    await world.start()
    await world.train(1, 2)
    await world.kill()
    await world.start()
    reports = await world.train(3, 4)
    assert [group for report in reports for group in report["group_ids"]] == world.passed_by(16)[8:]
    await world.kill()
