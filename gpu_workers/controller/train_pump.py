"""The train pump: one optimizer step from the groups that the sampler selects.

Takes from: replay buffer (claim). Gives to: trainer ranks. Waits for: a whole batch. The commit window reaches from the
first irreversible act of the optimizer until consumed rows are gone and both counters are raised; no cut is inside it.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.finalizer import digest_of_rows
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import StepResult, Trainer
from gpu_workers.controller.row_store import gather
from gpu_workers.controller.stale_groups import StaleGroups
from gpu_workers.controller.weight_sync import WeightSync
from storage.errors import BatchIncomplete, BrokenInvariant, StepOutOfOrder
from storage.records import BufferedGroup
from storage.rows import RowHandle


class TrainPump:
    """Steps are numbered from 1. A step is committed once; asking for it again returns its report."""

    def __init__(
        self, parts: RolloutParts, trainer: Trainer, weight_sync: WeightSync, stale_groups: StaleGroups
    ) -> None:
        self._parts = parts
        self._trainer = trainer
        self._weight_sync = weight_sync
        self._stale_groups = stale_groups
        self._reports: dict[int, Mapping[str, Any]] = {}
        config = parts.config.algorithm
        self._step_size = config.num_prompts_per_step
        self._groups_per_call = max(1, config.microbatch_rows // config.num_generations_per_prompt)

    async def train_step(self, step: int) -> Mapping[str, Any] | None:
        """Train `step` and refit the generators. None when the data has ended before it.

        Raises `StepOutOfOrder` when its predecessor is not committed. A failure before the commit window gives the
        claimed groups back; a failure inside it ends the run, since the optimizer's state is unknown.
        """
        state = self._parts.state
        if step <= state.train_steps:
            await self._weight_sync.ensure(state.trainer_version)
            return self._reports.get(step, {"step": step, "already_committed": True})
        if step != state.train_steps + 1:
            raise StepOutOfOrder(
                f"train step {step} was asked for after step {state.train_steps}; ask for the next one"
            )
        await self._release_claims()  # of a try that was cancelled twice, before it could do so itself
        await self._weight_sync.ensure(state.trainer_version)
        recorded = state.recorded.batch(step)
        if recorded is not None:
            return await self._replay(step, recorded)
        started = time.perf_counter()
        groups = await self._wait_for_batch()
        if groups is None:
            return None
        waited_s = time.perf_counter() - started
        groups, handles = await self._claim(groups, step)
        try:
            await self._accumulate(step, groups)
        except BaseException:
            await self._release_claims()
            raise
        result = await self._commit(step, groups)
        # Before the refit: a step whose refit fails is committed all the same, and its retry must find the report.
        self._reports[step] = self._report(result, groups, handles, waited_s, time.perf_counter() - started)
        await self._weight_sync.ensure(state.trainer_version)
        return self._reports[step]

    def report(self, step: int) -> Mapping[str, Any]:
        """What this process's training of `step` came to; empty for a step that another process trained."""
        return self._reports.get(step, {})

    async def _replay(self, step: int, groups: Sequence[BufferedGroup]) -> Mapping[str, Any]:
        """Train a batch again that was trained before the restart, in its order; nothing is selected or generated."""
        started = time.perf_counter()
        handles = self._parts.rows.rows(row for group in groups for row in group.row_ids)
        await self._accumulate(step, groups)
        result = await self._commit(step, groups)
        seconds = time.perf_counter() - started
        self._reports[step] = self._report(result, groups, handles, 0.0, seconds, replayed=True)
        await self._weight_sync.ensure(self._parts.state.trainer_version)
        return self._reports[step]

    async def _release_claims(self) -> None:
        """Give back what a step has claimed that did not commit."""
        if self._parts.buffer.claimed():
            async with self._parts.barrier.mutation("release_claims") as mutation:
                self._parts.buffer.release_claims(mutation)

    async def _wait_for_batch(self) -> list[BufferedGroup] | None:
        """Wait until the step's target is reached; the target is read again each time, since drops shrink it.

        Stale groups are given up before anything is selected, and whenever another one turns up.
        """
        state, stale = self._parts.state, self._stale_groups
        while True:
            await stale.give_up()
            await state.changed.wait_for(
                lambda: state.failure is not None or bool(stale) or self._is_complete() or self._is_starved()
            )
            if state.failure is not None:
                raise state.failure
            if not stale:
                break
        if self._is_complete():
            return self._selected(least=self._target())
        groups = self._selected()
        if not groups and not self._parts.buffer.ready():
            return None
        raise BatchIncomplete(
            f"train step {state.train_steps + 1} has {len(groups)} of {self._wanted()} groups, and neither the prompt "
            f"source nor the ledger holds anything more; {len(self._parts.buffer.ready())} other groups are ready"
        )

    def _selected(self, *, least: int = 1) -> list[BufferedGroup]:
        parts, version = self._parts, self._parts.state.trainer_version
        ready, unfinished = parts.buffer.ready(), parts.ledger.admitted()
        return parts.sampler.select(ready, unfinished, version=version, least=least, most=self._wanted())

    def _wanted(self) -> int:
        """Groups of a whole step, less those that will never arrive."""
        return self._step_size - self._parts.state.shortfall.get(self._parts.state.trainer_version, 0)

    def _target(self) -> int:
        """Groups that the step waits for. Without stamps no step has a shortfall: the last one takes what is left."""
        if self._parts.state.stamps is False and self._is_starved():
            return len(self._selected())
        return self._wanted()

    def _is_complete(self) -> bool:
        target = self._target()
        return target > 0 and bool(self._selected(least=target))

    def _is_starved(self) -> bool:
        """Nothing more can ever come: the source is exhausted, no whole spare batch is left, the ledger is empty."""
        no_spare_batch = len(self._parts.state.spares) < self._step_size
        return self._parts.source.exhausted and no_spare_batch and not len(self._parts.ledger)

    async def _claim(self, groups: Sequence[BufferedGroup], step: int) -> tuple[list[BufferedGroup], list[RowHandle]]:
        async with self._parts.barrier.mutation("claim") as mutation:
            claimed = self._parts.buffer.claim(mutation, groups, step=step)
            return claimed, self._parts.rows.rows(row for g in claimed for row in g.row_ids)

    async def _accumulate(self, step: int, groups: Sequence[BufferedGroup]) -> None:
        await self._trainer.begin_step(step)
        for first in range(0, len(groups), self._groups_per_call):
            chunk = groups[first : first + self._groups_per_call]
            await self._trainer.train_microbatch([gather(self._parts.rows.rows(g.row_ids)) for g in chunk])
        await self._trainer.flush_microbatches()

    async def _commit(self, step: int, groups: Sequence[BufferedGroup]) -> StepResult:
        """The optimizer-commit window."""
        parts, state = self._parts, self._parts.state
        state.in_commit_window = True
        try:
            result = await self._trainer.finish_step(step)
            async with parts.barrier.mutation("commit_step") as mutation:
                self._let_go(mutation, step, groups)
                state.shortfall.pop(state.trainer_version, None)
                state.train_steps = step
                state.trainer_version += 1
        except BaseException as error:
            unknown = BrokenInvariant(
                f"train step {step} failed inside its commit window ({error}); whether the optimizer moved is unknown: "
                "restore from the store"
            )
            state.fail(unknown)
            raise unknown from error
        state.in_commit_window = False
        state.changed.notify()
        return result

    def _let_go(self, mutation: Mutation, step: int, groups: Sequence[BufferedGroup]) -> None:
        """The buffer gives a trained batch up. Its rows stay until a trainer checkpoint has made the step durable:
        a restart trains them again. Without rollout snapshots nothing could, and they go at once.
        """
        parts = self._parts
        if parts.state.recorded.batch(step) is not None:
            return
        parts.buffer.drop(mutation, groups)
        if parts.config.rollout_checkpointing.enabled:
            parts.state.recorded.record(mutation, step, groups)
        else:
            parts.rows.remove(mutation, [row for group in groups for row in group.row_ids])

    def _report(
        self,
        result: StepResult,
        groups: Sequence[BufferedGroup],
        handles: Sequence[RowHandle],
        waited_s: float,
        seconds: float,
        *,
        replayed: bool = False,
    ) -> Mapping[str, Any]:
        rewards = [reward for group in groups for reward in group.rewards]
        report = {
            "step": result.step,
            "version": self._parts.state.trainer_version,
            "prompt_ids": [group.prompt.prompt_id for group in groups],
            "group_ids": [group.group_id for group in groups],
            "rewards_mean": sum(rewards) / len(rewards),
            "batch_age": batch_age(groups, self._parts.state.trainer_version - 1),
            "metrics": dict(result.metrics),
            "weights_sha256": result.weights_sha256,
            "rollouts_sha256": digest_of_rows([handle.digest for handle in handles]),
            "seconds": seconds,
            "waited_s": waited_s,
            "replayed": replayed,
        }
        self._parts.trace.record("train_step", **report)
        return report


def batch_age(groups: Sequence[BufferedGroup], version: int) -> float:
    """Token-weighted mean of `version` - v over tokens generated under version v; trained at `version`."""
    pairs = [pair for group in groups for pair in group.version_tokens]
    tokens = sum(count for _, count in pairs)
    return sum(count * (version - generated) for generated, count in pairs) / tokens if tokens else 0.0
