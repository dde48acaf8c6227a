"""The rollout pump: takes prompts from the source, promises them in the ledger, and runs their groups to the end.

Takes from: prompt source, restored ledger. Gives to: replay buffer (through the finalizer). Waits for: admission by the
sampler, capacity.
"""

import asyncio
from dataclasses import replace

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.group_runner import GroupRunner
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.samplers.build import capacity_of
from gpu_workers.controller.step_demand import StepDemand
from storage.errors import BrokenInvariant
from storage.records import GroupPhase, LedgerGroup, PromptRef


class RolloutPump:
    """One loop. Restored unfinished work is launched before any new prompt is taken."""

    def __init__(self, parts: RolloutParts, runner: GroupRunner) -> None:
        self._parts = parts
        self._runner = runner
        self._step_size = parts.config.algorithm.num_prompts_per_step
        self._capacity = capacity_of(parts.config, parts.sampler)
        self._demand = StepDemand(parts)

    @property
    def running(self) -> int:
        """Groups launched and not finished."""
        return self._runner.running

    async def run(self) -> None:
        """Run until every prompt is taken and every group has left the ledger. An error of one group ends all.

        While recorded steps are trained again, the generators hold weights that nothing may be started from.
        """
        state = self._parts.state
        await state.changed.wait_for(lambda: state.has_caught_up)
        async with asyncio.TaskGroup() as tasks:
            await self._launch_restored(tasks)
            while batch := await self._reserve_batch():
                await self._admit_and_launch(tasks, batch[0].batch)

    async def _launch_restored(self, tasks: asyncio.TaskGroup) -> None:
        """Admitted groups first, with their saved stamps; then reserved ones, one admission per original batch.

        The other order deadlocks: a reserved batch may wait for the step that the admitted groups complete.
        """
        groups = self._parts.ledger.groups()
        for group in groups:
            self._parts.trace.record(
                "redispatched",
                group_id=group.group_id,
                siblings=[s.generation_index for s in group.siblings if s.sealed is None],
            )
        for group in groups:
            if group.phase is GroupPhase.ADMITTED:
                await self._launch(tasks, group)
        for batch in sorted({g.batch for g in groups if g.phase is GroupPhase.RESERVED}):
            await self._admit_and_launch(tasks, batch)

    async def _reserve_batch(self) -> list[LedgerGroup]:
        """Take one batch and own it in the same mutation; empty at the end of the data."""
        parts = self._parts
        await parts.state.changed.wait_for(lambda: not parts.state.parked)
        await self._refill_spares()
        async with parts.barrier.mutation("reserve_batch") as mutation:
            prompts = parts.source.take(mutation, self._step_size)
            missing = self._step_size - len(prompts)
            if missing and len(parts.state.spares) >= missing:
                prompts += [parts.state.spares.popleft() for _ in range(missing)]
            groups = self._reserve(mutation, prompts)
        for group in groups:
            parts.trace.record(
                "group_reserved",
                group_id=group.group_id,
                prompt_id=group.prompt.prompt_id,
                epoch=group.prompt.epoch,
                batch=group.batch,
                level=group.level,
            )
        return groups

    def _reserve(self, mutation: Mutation, prompts: list[PromptRef]) -> list[LedgerGroup]:
        state, config = self._parts.state, self._parts.config
        batch, state.next_batch = state.next_batch, state.next_batch + bool(prompts)
        first, state.next_order = state.next_order, state.next_order + len(prompts)
        return [
            self._parts.ledger.reserve(
                mutation,
                prompt,
                level=self._parts.level_of(prompt),
                batch=batch,
                order=order,
                size=config.algorithm.num_generations_per_prompt,
            )
            for order, prompt in enumerate(prompts, start=first)
        ]

    async def _refill_spares(self) -> None:
        """Keep spare prompts in hand, once it is known that the sampler stamps steps."""
        parts, wanted = self._parts, self._parts.config.async_rl
        if not parts.state.stamps or wanted.on_dropped_prompt != "replace":
            return
        missing = wanted.spare_prompts - len(parts.state.spares)
        if missing > 0 and not parts.source.exhausted:
            async with parts.barrier.mutation("refill_spares") as mutation:
                parts.state.spares.extend(parts.source.take(mutation, missing))

    async def _admit_and_launch(self, tasks: asyncio.TaskGroup, batch: int) -> None:
        parts, state = self._parts, self._parts.state
        first = next(group for group in parts.ledger.groups() if group.batch == batch)
        await state.changed.wait_for(lambda: self._may_admit(first))
        async with parts.barrier.mutation("admit") as mutation:
            stamp = parts.sampler.admit(mutation)
            if state.stamps not in (None, stamp is not None):
                raise BrokenInvariant(f"sampler '{parts.sampler.name}' stamps some batches and others not")
            groups = parts.ledger.admit(mutation, batch, target_step=stamp, start_version=state.generator_version)
            state.stamps = stamp is not None
            if stamp is not None and len(groups) < self._step_size:
                state.shortfall[stamp] = self._step_size - len(groups)
        for group in groups:
            parts.trace.record(
                "group_admitted",
                group_id=group.group_id,
                target_step=group.target_step,
                start_version=group.start_version,
            )
        for group in groups:
            await self._launch(tasks, group)

    def _may_admit(self, group: LedgerGroup) -> bool:
        """The sampler's gate. Without stamps a group's age counts from here: its batch is admitted when there is room.

        Nothing is started from weights that are too old already: their refit is under way.
        """
        state, sampler = self._parts.state, self._parts.sampler
        started = replace(group, start_version=state.generator_version)
        if state.parked or sampler.should_abort_inflight(started, version=state.trainer_version):
            return False
        if state.stamps is False and not self._has_room(started):
            return False
        return sampler.may_admit(state.generator_version) or self._cannot_fill_step()

    def _cannot_fill_step(self) -> bool:
        """Whether the step that the trainer waits for can't be filled from what was admitted.

        Groups given up without a stamp leave no shortfall: gate and step would wait for each other for ever.
        """
        state, buffer = self._parts.state, self._parts.buffer
        if state.stamps is not False or state.generator_version != state.trainer_version:
            return False
        return len(buffer) + len(self._parts.ledger.admitted()) < self._step_size

    async def _launch(self, tasks: asyncio.TaskGroup, group: LedgerGroup) -> None:
        ledger = self._parts.ledger
        await self._parts.state.changed.wait_for(lambda: group.group_id not in ledger or self._has_room(group))
        if group.group_id not in ledger:
            return  # given up as stale before there was room
        self._runner.start(tasks, group.group_id)

    def _has_room(self, group: LedgerGroup) -> bool:
        """Capacity is derived from its owners. What the step in training waits for may always run."""
        state = self._parts.state
        if state.parked or self.running >= self._parts.config.generation.max_inflight_groups:
            return False
        if self._capacity is None or self.running + len(self._parts.buffer) < self._capacity:
            return True
        if group.target_step is not None:
            return group.target_step <= state.trainer_version
        return self._waits_for_launch()

    def _waits_for_launch(self) -> bool:
        """Without stamps: whether the trainer waits, and neither what runs nor an eviction could end its waiting."""
        parts, version = self._parts, self._parts.state.trainer_version
        if self.running or self._demand.left() <= 0 or parts.state.generator_version != version:
            return False
        return not parts.sampler.evict(parts.buffer.ready(), version=version) and not self._demand.next_chunk()
