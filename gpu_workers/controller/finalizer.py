"""Turns finished groups into training rows, a few at a time; the others queue.

    ready_to_finalize --begin--> finalizing --publish--> (replay buffer)
          |    ^                   | | +--evicted meanwhile--> gone, nothing is written
          |    +--none can be trained+ +--failed--> finalization_unknown: the run stops and saves nothing
          +--discarded while it queues--> gone, nothing is written

What is published is kept until the group is trained, and saved: its rows, and in the replay buffer's record their
rewards, tokens and weight versions. A reason to drop a group is kept, and saved, with its dropped prompt.
"""

import asyncio
from collections.abc import Callable, Sequence

import pyarrow as pa

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.row_assembly import (
    AssembledGroup,
    assemble_group,
    describe_group,
    digest_of_rows,
    sealed_of,
)
from gpu_workers.controller.stale_groups import EVICTED
from storage.errors import FinalizationUnknown
from storage.records import BufferedGroup, DroppedPrompt, LedgerGroup, RowKind, rollout_id
from storage.rows import RowHandle

Assemble = Callable[[LedgerGroup, Sequence[Sequence[RowHandle]]], AssembledGroup]


class Finalizer:
    """`async_rl.finalizer_workers` groups at once, off the event loop, in the order in which they were finished.

    Publishing, indexing and releasing the ledger entry are one mutation, as is everything that a drop removes.
    """

    def __init__(self, parts: RolloutParts, assemble: Assemble = assemble_group) -> None:
        """`assemble` is called in a thread."""
        self._parts = parts
        self._assemble = assemble
        self._workers = asyncio.Semaphore(parts.config.async_rl.finalizer_workers)

    async def finalize(self, group_id: str) -> str:
        """Publish a group whose siblings are all sealed.

        Returns why the caller has to give it up instead: nothing of it can be trained. Empty when that is not so, also
        for a group that was evicted while its rows were written.

        Raises `FinalizationUnknown`, after which the run has failed, for any error once the work has begun. A caller
        that is cancelled while the group queues leaves no trace.
        """
        async with self._workers:
            async with self._parts.barrier.mutation("begin_finalize") as mutation:
                group = self._parts.ledger.begin_finalize(mutation, group_id)
                calls = [self._parts.rows.rows(sealed_of(s.sealed).call_keys) for s in group.siblings]
            try:
                assembled = await asyncio.to_thread(self._assemble, group, calls)
                return await self._take_over(group, assembled)
            except Exception as error:
                raise await self._unknown(group, error) from error

    async def _take_over(self, group: LedgerGroup, assembled: AssembledGroup) -> str:
        parts = self._parts
        for index, problem in assembled.unjoined.items():
            parts.trace.record("rollout_masked", rollout_id=rollout_id(group.group_id, index), reason=problem)
        finished = describe_group(group, assembled.rows)
        async with parts.barrier.mutation("publish_group") as mutation:
            if assembled.drop_reason:
                parts.ledger.stop_finalizing(mutation, group.group_id)
                return assembled.drop_reason
            evicted = self._is_evicted(finished)
            parts.rows.remove(mutation, [key for s in group.siblings for key in sealed_of(s.sealed).call_keys])
            if evicted:
                self._drop(mutation, group)
            else:
                parts.rows.put(mutation, RowKind.TRAINING_ROW, assembled.rows)
                parts.buffer.add(mutation, finished)
                parts.ledger.release(mutation, group.group_id)
        if evicted:
            self._record_evicted(finished)
        else:
            self._record_published(finished, assembled.rows)
        parts.state.changed.notify()
        return ""

    def _is_evicted(self, group: BufferedGroup) -> bool:
        """Whether the sampler has given the group's place up meanwhile. One that a step still counts on is published:
        evicting it then makes that step smaller (`StaleGroups`).
        """
        state = self._parts.state
        if state.in_commit_window or (group.target_step is not None and group.target_step >= state.trainer_version):
            return False
        return bool(self._parts.sampler.evict([group], version=state.trainer_version))

    def _drop(self, mutation: Mutation, group: LedgerGroup) -> None:
        self._parts.ledger.stop_finalizing(mutation, group.group_id)
        self._parts.ledger.discard(mutation, group.group_id)
        self._parts.state.dropped.append(DroppedPrompt(group.prompt, EVICTED, group.target_step))

    async def _unknown(self, group: LedgerGroup, error: Exception) -> FinalizationUnknown:
        """Fail the run before anything else can happen: a cut that waits already must not save what is half done."""
        unknown = FinalizationUnknown(
            f"the rows of group {group.group_id} are unknown, since its finalization failed after it had begun "
            f"({error!r}); nothing is saved any more: restart the run, which finalizes the group again from its calls"
        )
        self._parts.state.fail(unknown)
        self._parts.trace.record("finalization_unknown", group_id=group.group_id, reason=repr(error)[:500])
        async with self._parts.barrier.mutation("finalization_unknown") as mutation:
            self._parts.ledger.mark_finalization_unknown(mutation, group.group_id)
        return unknown

    def _record_evicted(self, group: BufferedGroup) -> None:
        self._parts.trace.record(
            "group_discarded",
            group_id=group.group_id,
            reason=EVICTED,
            target_step=group.target_step,
            start_version=group.start_version,
            version=self._parts.state.trainer_version,
        )

    def _record_published(self, group: BufferedGroup, rows: pa.RecordBatch) -> None:
        self._parts.trace.record("group_sealed", group_id=group.group_id)
        self._parts.trace.record(
            "group_published",
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            epoch=group.prompt.epoch,
            target_step=group.target_step,
            start_version=group.start_version,
            version_tokens=[list(pair) for pair in group.version_tokens],
            num_tokens=group.num_tokens,
            rewards=list(group.rewards),
            rollout_sha256=digest_of_rows(rows.column("digest").to_pylist()),
        )
