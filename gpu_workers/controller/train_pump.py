"""The train pump: one optimizer step from the groups that the sampler selects.

    wait for a chunk -> claim -> accumulate gradients -> ... until the step is whole -> optimizer step -> drop -> refit

Takes from: replay buffer (claim). Gives to: trainer ranks. Waits for: the next chunk of finished groups, by default the
whole batch. The commit window reaches from the first irreversible act of the optimizer until consumed rows are gone and
both counters are raised; no cut is inside it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import StepResult, Trainer
from gpu_workers.controller.row_assembly import digest_of_rows
from gpu_workers.controller.row_store import gather
from gpu_workers.controller.stale_groups import StaleGroups
from gpu_workers.controller.step_demand import StepDemand
from gpu_workers.controller.weight_sync import WeightSync
from storage.errors import BatchIncomplete, BrokenInvariant, StepOutOfOrder, TrainerLost
from storage.fault_points import reached
from storage.records import BufferedGroup
from storage.rows import RowHandle


@dataclass(slots=True)
class _FedStep:
    """What one step was fed, in training order: its groups, the digests of their rows, the sizes of its chunks."""

    groups: list[BufferedGroup] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    waited_s: float = 0.0

    def add(self, groups: Sequence[BufferedGroup], rows: Sequence[RowHandle]) -> None:
        """One more chunk, and the rows of its groups in their order."""
        self.groups += groups
        self.digests += [row.digest for row in rows]
        self.chunks.append(len(groups))


class TrainPump:
    """Steps are numbered from 1. A step is committed once; asking for it again returns its report."""

    def __init__(
        self, parts: RolloutParts, trainer: Trainer, weight_sync: WeightSync, stale_groups: StaleGroups
    ) -> None:
        self._parts = parts
        self._trainer = trainer
        self._weight_sync = weight_sync
        self._stale_groups = stale_groups
        self._demand = StepDemand(parts)
        self._reports: dict[int, Mapping[str, Any]] = {}
        config = parts.config.algorithm
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
        started = time.perf_counter()
        try:
            fed = await (self._feed(step) if recorded is None else self._feed_again(step, recorded))
        except BaseException:
            await self._release_claims()
            raise
        if fed is None:
            return None
        result = await self._commit(step, fed.groups)
        # Before the refit: a step whose refit fails is committed all the same, and its retry must find the report.
        seconds, replayed = time.perf_counter() - started, recorded is not None
        self._reports[step] = self._report(result, fed, seconds, replayed=replayed)
        await self._weight_sync.ensure(state.trainer_version)
        return self._reports[step]

    async def _feed_again(self, step: int, groups: Sequence[BufferedGroup]) -> _FedStep:
        """A batch that was trained before the restart, in its order; nothing is selected, claimed or generated."""
        fed = _FedStep()
        fed.add(groups, self._parts.rows.rows(row for group in groups for row in group.row_ids))
        await self._trainer.begin_step(step)
        await self._accumulate(groups)
        await self._trainer.flush_microbatches()
        return fed

    def report(self, step: int) -> Mapping[str, Any]:
        """What this process's training of `step` came to; empty for a step that another process trained."""
        return self._reports.get(step, {})

    async def _release_claims(self) -> None:
        """Give back what a step has claimed that did not commit."""
        if self._parts.buffer.claimed():
            async with self._parts.barrier.mutation("release_claims") as mutation:
                self._parts.buffer.release_claims(mutation)

    async def _feed(self, step: int) -> _FedStep | None:
        """Claim finished groups and accumulate their gradients until the step is whole; None when the data has ended
        before it. Claimed groups and their rows stay, and stay saved, until the step commits.
        """
        fed = _FedStep()
        while True:
            asked = time.perf_counter()
            chunk = await self._wait_for_chunk()
            fed.waited_s += time.perf_counter() - asked
            if chunk is None:
                return None
            if not chunk:
                await self._trainer.flush_microbatches()
                return fed
            groups = await self._claim(chunk, step, fed)
            if len(fed.chunks) == 1:
                await self._trainer.begin_step(step)
            await self._accumulate(groups)

    async def _wait_for_chunk(self) -> list[BufferedGroup] | None:
        """The groups to train next; empty once the step is whole, None when the data has ended before it.

        The step's target is read again each time, since drops shrink it. Stale groups are given up before anything is
        selected, and whenever another one turns up.
        """
        parts, state, demand, stale = self._parts, self._parts.state, self._demand, self._stale_groups
        while True:
            await stale.give_up()
            await state.changed.wait_for(
                lambda: (
                    state.failure is not None
                    or bool(stale)
                    or demand.is_whole()
                    or bool(demand.next_chunk())
                    or demand.is_starved()
                )
            )
            if state.failure is not None:
                raise state.failure
            if not stale:
                break
        chunk = demand.next_chunk()
        if chunk or demand.is_whole():
            return chunk
        claimed, ready = len(parts.buffer.claimed()), len(parts.buffer.ready())
        if not claimed and not ready:
            return None
        raise BatchIncomplete(
            f"train step {state.train_steps + 1} has {claimed} of {demand.wanted()} groups, and neither the prompt "
            f"source nor the ledger holds anything more; {ready} other groups are ready"
        )

    async def _claim(self, chunk: Sequence[BufferedGroup], step: int, fed: _FedStep) -> list[BufferedGroup]:
        async with self._parts.barrier.mutation("claim") as mutation:
            groups = self._parts.buffer.claim(mutation, chunk, step=step)
            rows = self._parts.rows.rows(row for group in groups for row in group.row_ids)
        fed.add(groups, rows)
        return groups

    async def _accumulate(self, groups: Sequence[BufferedGroup]) -> None:
        for first in range(0, len(groups), self._groups_per_call):
            call = groups[first : first + self._groups_per_call]
            await self._trainer.train_microbatch([gather(self._parts.rows.rows(g.row_ids)) for g in call])

    async def _commit(self, step: int, groups: Sequence[BufferedGroup]) -> StepResult:
        """The optimizer-commit window."""
        parts, state = self._parts, self._parts.state
        state.in_commit_window = True
        try:
            result = await self._trainer.finish_step(step)
            reached("step:optimizer-moved", parts.config.name)
            async with parts.barrier.mutation("commit_step") as mutation:
                self._let_go(mutation, step, groups)
                state.shortfall.pop(state.trainer_version, None)
                state.train_steps = step
                state.trainer_version += 1
        except TrainerLost as lost:  # whatever its optimizer did is gone with it
            state.fail(lost)
            raise
        except BaseException as error:
            unknown = BrokenInvariant(
                f"train step {step} failed inside its commit window ({error}); whether the optimizer moved is unknown: "
                "restore from the store"
            )
            state.fail(unknown)
            raise unknown from error
        state.in_commit_window = False
        state.changed.notify()
        reached("step:committed", parts.config.name)
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

    def _report(self, result: StepResult, fed: _FedStep, seconds: float, *, replayed: bool) -> Mapping[str, Any]:
        groups = fed.groups
        rewards = [reward for group in groups for reward in group.rewards]
        report = {
            "step": result.step,
            "version": self._parts.state.trainer_version,
            "prompt_ids": [group.prompt.prompt_id for group in groups],
            "group_ids": [group.group_id for group in groups],
            "chunks": list(fed.chunks),
            "rewards_mean": sum(rewards) / len(rewards),
            "batch_age": batch_age(groups, self._parts.state.trainer_version - 1),
            "metrics": {**result.metrics, **self._parts.trace.take_counts()},
            "weights_sha256": result.weights_sha256,
            "rollouts_sha256": digest_of_rows(fed.digests),
            "seconds": seconds,
            "waited_s": fed.waited_s,
            "replayed": replayed,
        }
        self._parts.trace.record("train_step", **report)
        return report


def batch_age(groups: Sequence[BufferedGroup], version: int) -> float:
    """Token-weighted mean of `version` - v over tokens generated under version v; trained at `version`."""
    pairs = [pair for group in groups for pair in group.version_tokens]
    tokens = sum(count for _, count in pairs)
    return sum(count * (version - generated) for generated, count in pairs) / tokens if tokens else 0.0
