"""Runs with random holds, failures, snapshots and kills: at the end everything was trained exactly once."""

import asyncio
import random

import pytest

from gpu_workers.controller.ports import Failure
from gpu_workers.controller.row_assembly import digest_of_rows
from storage.errors import InfrastructureFailure, MidflightError, StoreUnavailable

DATA = Failure(infrastructure=False, message="the answer can't be scored")
INFRASTRUCTURE = Failure(infrastructure=True, message="503 from the engine")
LIVES = 3
SAVING = (
    {},
    {"async_save": True},
    {"async_save": True, "defer_async_checkpoint_finalize": True},
)


class Fate:
    """What befalls one run, drawn from a seed."""

    def __init__(self, seed: int, *, drops: bool) -> None:
        self._seed = seed
        self.random = random.Random(seed)
        self._drops = drops
        self._attempts = 0

    def sections(self, **more):
        draw = self.random.choice
        sections = {
            "algorithm": {"num_prompts_per_step": 2, "max_steps": 99},
            "data": {"num_prompts": draw((12, 15)), "num_epochs": draw((1, 2))},
            "async_rl": {
                "max_lookahead_versions": draw((0, 1, 2)),
                "on_dropped_prompt": draw(("replace", "shrink")),
                "spare_prompts": draw((0, 1, 3)),
                "max_data_failures": 0,
                "max_skipped_prompts": 99,
                "retry_backoff_s": 0.0001,
                "retry_backoff_max_s": 0.0001,
            },
            "checkpointing": {
                "save_period": draw((1, 2, 3, 5, 10)),
                "save_data_plane": draw((True, True, False)),
                **SAVING[self._seed % len(SAVING)],
            },
            "rollout_recovery": {"target_level": draw(("sibling", "prompt_group", "prefix"))},
        }
        for section, values in more.items():
            sections[section] = {**sections[section], **values}
        return sections

    def strike(self, world):
        """Some siblings fail, some are held; now and then the trainer or the store fails once."""
        chance = self.random.random
        for group_id in world.passed_by(world.config.data.num_epochs * len(world.dataset)):
            for index in range(2):
                if chance() < 0.15:
                    world.generator.failures[f"{group_id}_g{index}"] = [INFRASTRUCTURE]
                elif self._drops and chance() < 0.04:
                    world.generator.failures[f"{group_id}_g{index}"] = [DATA]
        held = {(group_id, index) for group_id in world.passed_by(30) for index in (0, 1) if chance() < 0.3}
        world.generator.held = lambda group_id, index: (group_id, index) in held
        tokens = {f"{group_id}_g{index}": self.random.randrange(4) for group_id, index in sorted(held)}
        world.generator.had = lambda rollout: tokens.get(rollout, 0)
        if chance() < 0.3:
            world.store.fail("change", "", StoreUnavailable("the store is down"), passing=self.random.randrange(40))
        if chance() < 0.3:
            errors = [InfrastructureFailure("a rank died")]
            place = self.random.choice(("before_microbatch", "before_finish"))
            setattr(world.trainer, place, lambda: errors and _raise(errors.pop()))

    async def live(self, world):
        """Train, snapshot and idle in a random order, several things at once, until the kill."""
        controller, works = world.controller, []
        for _ in range(self.random.randrange(3, 12)):
            action = self.random.choice(("train", "snapshot", "snapshot", "idle", "release"))
            if action == "train":
                step = controller.parts.state.train_steps + 1
                works.append(asyncio.create_task(controller.train_steps(step, step + self.random.randrange(2))))
            elif action == "snapshot":
                self._attempts += 1
                works.append(asyncio.create_task(controller.attempt_snapshot(self._attempts, force=True)))
            elif action == "release" and self.random.random() < 0.5:
                world.generator.release()
            for _ in range(self.random.randrange(40)):
                await asyncio.sleep(0 if self.random.random() < 0.9 else 0.001)
            if controller.state == "running":
                world.check()
        await world.kill()
        world.store.troubles.clear()
        for result in await asyncio.gather(*works, return_exceptions=True):
            assert not isinstance(result, BaseException) or isinstance(result, MidflightError), result


def _raise(error):
    raise error


async def _through_all_lives(world, fate):
    for _ in range(LIVES):
        world.boot()
        fate.strike(world)
        try:
            await world.restore(world.plan())
        except StoreUnavailable:
            assert world.controller.state == "empty"
            world.store.troubles.clear()
            await world.restore(world.plan())
        await fate.live(world)
    controller = await world.start()
    first = controller.parts.state.train_steps + 1
    assert (await controller.train_steps(first, 99))[-1]["end_of_data"] is True
    world.check()
    await world.kill()


def _require_trained_rows_are_published_rows(world):
    """Rows trained are rows sealed: each trained group's rows are those of one publication of that group."""
    published: dict[str, set[str]] = {}
    for _, trace in world.lives:
        for event in trace.of("group_published"):
            published.setdefault(event["group_id"], set()).add(event["rollout_sha256"])
    steps = [event["group_ids"] for event in world.trace.of("train_step")]
    for group_ids, digests in zip(steps, world.trainer.trained, strict=True):
        assert len(digests) == 2 * len(group_ids)
        for place, group_id in enumerate(group_ids):
            assert digest_of_rows(digests[2 * place : 2 * place + 2]) in published[group_id]


@pytest.mark.parametrize("seed", range(30))
async def test_after_any_restarts_every_prompt_was_trained_exactly_once_or_given_up_on_purpose(make_world, seed):
    await _require_exactly_once(make_world, Fate(seed, drops=True))


@pytest.mark.parametrize("seed", range(200, 220))
async def test_after_any_restarts_of_streamed_steps_every_prompt_was_trained_exactly_once(make_world, seed):
    streamed = {"min_groups_for_streaming_train": 1, "finalizer_workers": 1 + seed % 3}
    await _require_exactly_once(make_world, Fate(seed, drops=True), async_rl=streamed)


async def _require_exactly_once(make_world, fate, **more):
    world = make_world(**fate.sections(**more))
    await _through_all_lives(world, fate)
    state = world.controller.parts.state
    trained = [group_id for groups in world.history().values() for group_id in groups]
    dropped = [dropped.prompt.group_id for dropped in state.dropped]
    pool = [prompt.group_id for prompt in state.spares]
    everything = world.passed_by(world.config.data.num_epochs * len(world.dataset))
    assert sorted([*trained, *dropped, *pool]) == sorted(everything)
    assert len(pool) < 2, "a whole step of spares would have been trained"
    _require_trained_rows_are_published_rows(world)
    audit = world.audit()
    assert (audit.problems, audit.pairs_trained) == ([], 2 * len(trained))
    assert audit.owners == {
        "trained": len(trained),
        "dropped": len(dropped),
        "spare_prompts": len(pool),
        "replay_buffer": 0,
        "ledger": 0,
    }


@pytest.mark.parametrize("seed", range(100, 110))
async def test_at_lookahead_zero_a_run_that_was_killed_ends_with_the_hashes_of_one_that_was_not(make_world, seed):
    fate = Fate(seed, drops=False)
    sections = fate.sections(async_rl={"max_lookahead_versions": 0})
    whole = make_world(**sections)
    controller = await whole.start()
    await controller.train_steps(1, 99)
    await whole.kill()
    world = make_world(**sections)
    await _through_all_lives(world, fate)
    hashes = [
        {step: (e["group_ids"], e["rollouts_sha256"], e["weights_sha256"]) for step, e in run.committed().items()}
        for run in (world, whole)
    ]
    assert hashes[0] == hashes[1]
    assert world.trainer.weights == whole.trainer.weights
