"""Runs one prompt group to its end: dispatch, seal each sibling, retry what failed, finalize, or give up.

dispatched --result--> sealed
           --failure, its turns and tokens are known (level `prefix`)--> resumed, the same attempt
           --any other failure--> abandoned, the next attempt
"""

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from gpu_workers.controller.call_peeker import CallPeeker
from gpu_workers.controller.environment_checkpoint import EnvironmentCheckpoint
from gpu_workers.controller.environment_snapshot import RESTART_ONLY
from gpu_workers.controller.failed_groups import FailedGroups
from gpu_workers.controller.failures import FailurePolicy
from gpu_workers.controller.finalizer import Finalizer
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import (
    DiscardedPartial,
    Generator,
    GroupOrder,
    RolloutResult,
    SiblingOrder,
    SiblingResult,
    TurnResult,
)
from gpu_workers.controller.recovery_ledger import StagedTurn
from gpu_workers.controller.rollout_deadlines import RolloutDeadlines
from gpu_workers.environments.ports import EpisodeId
from storage.errors import BrokenInvariant, InfrastructureFailure, WorkerDied
from storage.records import (
    AttemptStatus,
    EpisodeRecord,
    GroupStatus,
    LedgerGroup,
    Prompt,
    RowKind,
    SealedSibling,
    Sibling,
    rollout_id,
)

_REFUSED_PAUSE_S = 0.05  # an environment that stays closed, until its lease ends, is not asked without pause


class GroupRunner:
    """Executes ledger groups on the generators. Everything it learns is recorded in one mutation each."""

    def __init__(
        self,
        parts: RolloutParts,
        generator: Generator,
        finalizer: Finalizer,
        environment: EnvironmentCheckpoint,
        deadlines: RolloutDeadlines,
        peeker: CallPeeker,
    ) -> None:
        self._environment = environment
        self._peeker = peeker
        self._deadlines = deadlines
        self._parts = parts
        self._generator = generator
        self._finalizer = finalizer
        self._failed_groups = FailedGroups(parts)
        self._policy = FailurePolicy(parts.config)
        self._suspects_turn = asyncio.Lock()
        self._saw_worker_die: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """Groups started and not ended."""
        return len(self._tasks)

    def start(self, tasks: asyncio.TaskGroup, group_id: str) -> None:
        """Run a group, and then whichever prompts take its place, until one is published or none is left."""
        self._tasks[group_id] = tasks.create_task(self._run(group_id), name=f"group {group_id}")

    def stop(self, group_id: str) -> None:
        """End the task of a group that is not in the ledger any more; a group that does not run is ignored."""
        task = self._tasks.pop(group_id, None)
        if task is not None:
            task.cancel()

    async def _run(self, group_id: str) -> None:
        current = group_id
        try:
            while (replacement := await self._run_one(current)) is not None:
                self._saw_worker_die.discard(current)
                self._tasks[replacement] = self._tasks.pop(current)
                current = replacement
        finally:
            self._saw_worker_die.discard(current)
            self._tasks.pop(current, None)
            self._parts.state.changed.notify()

    async def _run_one(self, group_id: str) -> str | None:
        """Publish the group (None), or give it up (the id of its replacement, if any)."""
        ledger = self._parts.ledger
        prompt, message = self._parts.source.load(ledger.group(group_id).prompt), ""
        while (group := ledger.group(group_id)).status is GroupStatus.GENERATING:
            owed = [s for s in group.siblings if s.sealed is None]
            spent = next((s for s in owed if self._policy.is_spent(s)), None)
            if spent is not None:
                reason = message or self._policy.explain_interruptions(spent)
                infrastructure = not self._policy.is_data_spent(spent)
                await self._forget(group)
                return await self._failed_groups.give_up(group_id, reason, infrastructure=infrastructure)
            pause_s = max(map(self._policy.pause_s, owed))
            if pause_s:
                await asyncio.sleep(pause_s)
            async with self._turn_of(group):
                message = await self._attempt(group_id, prompt)
        await self._forget(group)
        untrainable = await self._finalizer.finalize(group_id)
        return await self._failed_groups.give_up(group_id, untrainable, infrastructure=False) if untrainable else None

    async def _forget(self, group: LedgerGroup) -> None:
        """Nothing of its episodes will be asked for any more."""
        await self._environment.forget([rollout_id(group.group_id, s.generation_index) for s in group.siblings])

    def _turn_of(self, group: LedgerGroup) -> contextlib.AbstractAsyncContextManager[object]:
        """Suspects run one at a time, so that only the guilty one meets the next crash; the others just run."""
        saw = group.group_id in self._saw_worker_die
        suspect = any(self._policy.is_suspect(s, saw_worker_die=saw) for s in group.siblings)
        return self._suspects_turn if suspect else contextlib.nullcontext()

    async def _attempt(self, group_id: str, prompt: Prompt) -> str:
        """Dispatch every unsealed sibling once. Returns the last failure's message, empty when all were sealed."""
        state = self._parts.state
        await state.changed.wait_for(lambda: not state.environment_closed)
        async with self._parts.barrier.mutation("dispatch") as mutation:
            running = self._parts.ledger.dispatch(mutation, group_id)
        asked = tuple(self._order_of(group_id, sibling) for sibling in running)
        for sibling, sent in zip(running, asked, strict=True):
            self._record_start(group_id, sibling, sent, prompt)
        keeps = self._parts.ledger.group(group_id).level.keeps_tokens
        order = GroupOrder(group_id, prompt, asked, self._environment.instance_of(group_id), keeps)
        ending = await self._listen(order, prompt)
        message = ending.last_failure
        for sent in asked:
            if self._is_running(group_id, sent.generation_index, sent.attempt):
                message = ending.reason
                await self._fail(group_id, sent, ending.reason, innocent=ending.innocent)
        if any(self._was_refused(group_id, order) for order in asked):
            await asyncio.sleep(_REFUSED_PAUSE_S)
        return message

    async def _listen(self, order: GroupOrder, prompt: Prompt) -> "_Ending":
        """Take what the generator says of a group, to its end.

        The tokens of siblings without a result are asked for before whatever is left of them is ended.
        """
        message, broken = "", "the generator ended the group without a result for this sibling"
        timed_out, died, timeout_s = False, False, self._parts.config.async_rl.rollout_timeout_s
        try:
            async with (
                self._deadlines.of(timeout_s),
                # Closed at once when the deadline passes, not when the garbage collector finds it.
                contextlib.aclosing(self._generator.generate(order)) as results,
            ):
                async for result in results:
                    message = await self._take(order, result, prompt) or message
        except TimeoutError:
            timed_out, broken = True, f"no result within async_rl.rollout_timeout_s {timeout_s}"
        except InfrastructureFailure as failure:
            broken, died = str(failure), isinstance(failure, WorkerDied)
            if died:
                self._saw_worker_die.add(order.group_id)
        if any(self._is_running(order.group_id, sent.generation_index, sent.attempt) for sent in order.siblings):
            await self._look_once_more(order.group_id)
        if timed_out:
            with contextlib.suppress(InfrastructureFailure):
                await self._generator.abort(order.group_id)
        return _Ending(message, broken, innocent=timed_out or died)

    def _order_of(self, group_id: str, sibling: Sibling) -> SiblingOrder:
        rollout = rollout_id(group_id, sibling.generation_index)
        kept = self._parts.ledger.staged(rollout)
        partial = self._parts.partial_calls.of(rollout, attempt=sibling.attempt, turn=len(kept))
        history: tuple[int, ...] = ()
        if kept:
            (last,) = self._parts.rows.rows([kept[-1].key])
            columns = (last.batch.column(name)[last.index].as_py() for name in ("prompt_token_ids", "token_ids"))
            history = tuple(token for tokens in columns for token in tokens)
        return SiblingOrder(
            sibling.generation_index,
            sibling.attempt,
            sibling.environment_attempt,
            turns=len(kept),
            history=history,
            partial=partial,
            episode=kept[-1].episode if kept else None,
        )

    async def _look_once_more(self, group_id: str) -> None:
        """Before an attempt ends without a result: the tokens that it has are kept."""
        if self._parts.ledger.group(group_id).level.keeps_tokens:
            await self._peeker.look()

    async def _take(self, order: GroupOrder, result: RolloutResult, prompt: Prompt) -> str:
        """Whatever a generator reports. Returns the message of a failure."""
        match result:
            case TurnResult():
                await self._stage(order.group_id, result)
            case DiscardedPartial():
                await self._forget_tokens(order.group_id, result)
            case SiblingResult():
                return await self._receive(order, result, prompt)
        return ""

    async def _forget_tokens(self, group_id: str, discarded: DiscardedPartial) -> None:
        """The generator could not go on from the tokens that it was sent, and has begun the call anew."""
        rollout = rollout_id(group_id, discarded.generation_index)
        async with self._parts.barrier.mutation("discard_tokens") as mutation:
            self._parts.partial_calls.drop(mutation, rollout)
        facts = {"rollout_id": rollout, "attempt": discarded.attempt, "tokens": discarded.tokens}
        self._parts.trace.record("prefix_discarded", **facts, reason=discarded.reason[:500])

    async def _stage(self, group_id: str, result: TurnResult) -> None:
        """Keep the call of a finished turn. Turns of attempts that are no longer owed are ignored."""
        if not self._is_owed(group_id, result.generation_index, result.attempt):
            return
        async with self._parts.barrier.mutation("stage") as mutation:
            self._parts.rows.put(mutation, RowKind.STAGED_CALL, result.calls)
            for turn in _turns_of(result.calls, result.episode):
                self._parts.ledger.stage(mutation, group_id, result.generation_index, turn)

    async def _receive(self, order: GroupOrder, result: SiblingResult, prompt: Prompt) -> str:
        """Seal a sibling or count its failure. Results of attempts that are no longer owed are ignored."""
        group_id, index = order.group_id, result.generation_index
        if not self._is_owed(group_id, index, result.attempt):
            return ""
        if result.failure is not None and result.failure.refused:
            await self._refuse(group_id, index, result.failure.message)
            return ""
        if result.failure is not None and result.failure.infrastructure:
            await self._look_once_more(group_id)
            if self._is_running(group_id, index, result.attempt):  # it may have been discarded meanwhile
                (sent,) = (sent for sent in order.siblings if sent.generation_index == index)
                await self._fail(group_id, sent, result.failure.message, innocent=False)
            return result.failure.message
        if result.failure is not None:
            await self._abandon(group_id, index, result.failure.message, infrastructure=False)
            return result.failure.message
        rollout, brought = rollout_id(group_id, index), result.calls
        turns = [*self._parts.ledger.staged(rollout), *(() if brought is None else _turns_of(brought))]
        if not turns:
            raise BrokenInvariant(f"sibling {rollout} returned neither calls nor a failure")
        sealed = SealedSibling(
            call_keys=tuple(turn.key for turn in turns),
            digests=tuple(turn.digest for turn in turns),
            reward=result.reward,
            masked=result.masked,
            num_tokens=sum(turn.num_tokens for turn in turns),
        )
        async with self._parts.barrier.mutation("seal") as mutation:
            if brought is not None:
                self._parts.rows.put(mutation, RowKind.STAGED_CALL, brought)
            self._parts.ledger.seal(mutation, group_id, index, sealed)
        sibling = self._parts.ledger.group(group_id).siblings[index]
        facts = {"reward": sealed.reward, "num_tokens": sealed.num_tokens, "digest": sealed.digests[-1]}
        seconds = {"generation_s": result.generation_s, "environment_s": result.environment_s}
        self._record("attempt_sealed", group_id, sibling, prompt, **facts, **seconds)
        return ""

    def _is_running(self, group_id: str, generation_index: int, attempt: int) -> bool:
        """Owed, and not refused: that attempt waits to be sent again."""
        if not self._is_owed(group_id, generation_index, attempt):
            return False
        sibling = self._parts.ledger.group(group_id).siblings[generation_index]
        return sibling.status is AttemptStatus.DISPATCHED

    def _was_refused(self, group_id: str, order: SiblingOrder) -> bool:
        """Still owed under the same attempt, but not running."""
        index, attempt = order.generation_index, order.attempt
        return self._is_owed(group_id, index, attempt) and not self._is_running(group_id, index, attempt)

    async def _refuse(self, group_id: str, generation_index: int, message: str) -> None:
        """The environment had closed meanwhile: the same attempt is sent again once it is open."""
        keeps = self._tokens_of(group_id, generation_index) > 0
        async with self._parts.barrier.mutation("refuse") as mutation:
            sibling = self._parts.ledger.refuse(mutation, group_id, generation_index, keeps_tokens=keeps)
        facts = {"rollout_id": rollout_id(group_id, generation_index), "attempt": sibling.attempt}
        self._parts.trace.record("attempt_refused", **facts, message=message[:500])

    def _is_owed(self, group_id: str, generation_index: int, attempt: int) -> bool:
        ledger = self._parts.ledger
        current = ledger.is_current(group_id, generation_index, attempt)
        return current and ledger.group(group_id).siblings[generation_index].sealed is None

    def _tokens_of(self, group_id: str, generation_index: int) -> int:
        """Tokens of its running call that the attempt can go on from."""
        rollout, ledger = rollout_id(group_id, generation_index), self._parts.ledger
        attempt, turn = ledger.group(group_id).siblings[generation_index].attempt, len(ledger.staged(rollout))
        partial = self._parts.partial_calls.of(rollout, attempt=attempt, turn=turn)
        return 0 if partial is None else len(partial.sampled)

    async def _fail(self, group_id: str, sent: SiblingOrder, message: str, *, innocent: bool) -> None:
        """Whatever ran an attempt failed. It goes on from the turns and tokens that are known of it; from its beginning
        where there are none, or on its last chance, where it got no further than the last time and these may be to
        blame (it is not `innocent`).
        """
        index = sent.generation_index
        rollout, ledger = rollout_id(group_id, index), self._parts.ledger
        turns, tokens = self._turns_to_keep(group_id, rollout), self._tokens_of(group_id, index)
        had = (sent.turns, 0 if sent.partial is None else len(sent.partial.sampled))
        failed = ledger.group(group_id).siblings[index]
        begins_anew = not innocent and self._policy.is_last_chance(failed) and (turns or 0, tokens) <= had
        if turns is None or not (turns or tokens) or begins_anew:
            return await self._abandon(group_id, index, message, infrastructure=True)
        async with self._parts.barrier.mutation("interrupt") as mutation:
            ledger.interrupt(mutation, group_id, index)
        facts = {"rollout_id": rollout, "attempt": failed.attempt, "turns": turns, "tokens": tokens}
        self._parts.trace.record("attempt_interrupted", **facts, reason="infrastructure", message=message[:500])
        return await self._environment.retire([EpisodeId(rollout, failed.environment_attempt)])

    def _turns_to_keep(self, group_id: str, rollout: str) -> int | None:
        """Finished turns behind which another environment can take the episode over; None when none can."""
        staged = self._parts.ledger.staged(rollout)
        if not self._parts.ledger.group(group_id).level.keeps_tokens:
            return None
        episode = staged[-1].episode if staged else None
        lost = staged and (episode is None or episode.mode == RESTART_ONLY)
        return None if lost else len(staged)

    async def _abandon(self, group_id: str, generation_index: int, message: str, *, infrastructure: bool) -> None:
        rollout, ledger = rollout_id(group_id, generation_index), self._parts.ledger
        failed = ledger.group(group_id).siblings[generation_index]
        async with self._parts.barrier.mutation("abandon") as mutation:
            self._parts.partial_calls.drop(mutation, rollout)
            self._parts.rows.remove(mutation, [turn.key for turn in ledger.staged(rollout)])
            ledger.abandon(mutation, group_id, generation_index, infrastructure=infrastructure)
        self._parts.trace.record(
            "attempt_abandoned",
            rollout_id=rollout,
            attempt=failed.attempt,
            reason="infrastructure" if infrastructure else "data",
            message=message[:500],
        )
        await self._environment.retire([EpisodeId(rollout, failed.environment_attempt)])

    def _record_start(self, group_id: str, sibling: Sibling, sent: SiblingOrder, prompt: Prompt) -> None:
        """An attempt that goes on from turns or tokens is resumed, any other one dispatched."""
        tokens = 0 if sent.partial is None else len(sent.partial.sampled)
        if sent.turns or tokens:
            facts = {"turns": sent.turns, "tokens": tokens, "environment_attempt": sent.environment_attempt}
            self._record("attempt_resumed", group_id, sibling, prompt, **facts)
        else:
            self._record("attempt_dispatched", group_id, sibling, prompt)

    def _record(self, event: str, group_id: str, sibling: Sibling, prompt: Prompt, **facts: Any) -> None:
        self._parts.trace.record(
            event,
            rollout_id=rollout_id(group_id, sibling.generation_index),
            attempt=sibling.attempt,
            prompt_id=prompt.ref.prompt_id,
            epoch=prompt.ref.epoch,
            generation_index=sibling.generation_index,
            **facts,
        )


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a generator's work on a group ended: the last failure that it told of, and why siblings have no result.

    `innocent`: that is not their fault, whatever they got to.
    """

    last_failure: str
    reason: str
    innocent: bool


def _turns_of(calls: pa.RecordBatch, episode: EpisodeRecord | None = None) -> list[StagedTurn]:
    """The turns that captured calls are, in their order; `episode`: how it stands behind the last of them."""
    columns = (calls.column(name).to_pylist() for name in ("row_id", "digest", "token_ids"))
    turns = [StagedTurn(key, digest, len(tokens)) for key, digest, tokens in zip(*columns, strict=True)]
    return [*turns[:-1], replace(turns[-1], episode=episode)]
