"""Tokens of running model calls, by rollout: taken over from peeks, made into rows before a cut, captured under it.

    peeked --extend--> held --stage--> rows --capture--> saved --load--> held --of--> continued

A call's tokens only grow, so that those of a peek are a prefix of whatever the call comes to. What the ledger says of a
sibling decides which of them count: entries of siblings that are sealed, or that run another call by now, are nobody's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gpu_workers.controller.barrier import Cut, Mutation
from gpu_workers.controller.call_tokens import CallTokens
from gpu_workers.controller.ports import KnownCall, PartialCompletion, PeekedCall, SampledTokens
from gpu_workers.controller.recovery_ledger import RecoveryLedger
from storage.records import (
    AttemptStatus,
    EpisodeRecord,
    LedgerGroup,
    PartialCall,
    RowKind,
    Sibling,
    partial_key,
    rollout_id,
)
from storage.rows import RowHandle, handles
from storage.schemas import PARTIAL_TOKENS, row_digest

_RUNNING = (AttemptStatus.DISPATCHED, AttemptStatus.RESUMED)
# After so many rows of one call its tokens are written once more, as one row: a snapshot refers to every row by name.
_MOST_ROWS = 32


@dataclass(frozen=True, slots=True)
class _Held:
    """One call. `record` describes the tokens that lie in `rows`, the first ones of `tokens`."""

    record: PartialCall
    tokens: CallTokens
    rows: tuple[RowHandle, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """How many calls and tokens are held."""

    calls: int
    tokens: int


class PartialCalls:
    """Owner of what is known of running calls."""

    def __init__(self, ledger: RecoveryLedger) -> None:
        self._ledger = ledger
        self._held: dict[str, _Held] = {}
        self._staging = asyncio.Lock()

    def wanted(self) -> dict[str, KnownCall]:
        """Every running sibling whose call's tokens are to be kept, and what is known of them."""
        wanted = {}
        for group in self._ledger.groups():
            if group.level.keeps_tokens:
                for sibling in group.siblings:
                    if sibling.status is AttemptStatus.DISPATCHED:
                        rollout = rollout_id(group.group_id, sibling.generation_index)
                        wanted[rollout] = self._known(rollout, sibling)
        return wanted

    def _known(self, rollout: str, sibling: Sibling) -> KnownCall:
        held = self._held.get(rollout)
        if held is None or held.record.attempt != sibling.attempt:
            return KnownCall(sibling.environment_attempt)
        return KnownCall(sibling.environment_attempt, held.record.turn, len(held.tokens))

    def is_news(self, call: PeekedCall) -> bool:
        """Whether it has a token, or an end, that is not known and counts."""
        if not self._is_current(call):
            return False
        held = self._held.get(call.rollout_id)
        if held is None or not _is_same(held.record, call):
            return bool(len(call.sampled) or call.finish_reason)
        return call.start + len(call.sampled) != len(held.tokens) or call.finish_reason != held.record.finish_reason

    def _is_current(self, call: PeekedCall) -> bool:
        """Whether it is what its sibling goes on with: of the execution that runs, or of one that was interrupted as
        long as no other has begun; of the turn after those that are staged.
        """
        sibling = self._sibling(call.rollout_id)
        if sibling is None or sibling.status not in _RUNNING or sibling.attempt != call.attempt:
            return False
        executed, waits = sibling.environment_attempt, sibling.status is AttemptStatus.RESUMED
        is_execution = call.environment_attempt == executed or (waits and call.environment_attempt < executed)
        return is_execution and call.turn == len(self._ledger.staged(call.rollout_id))

    def extend(self, mutation: Mutation, peeked: Iterable[PeekedCall]) -> None:
        """Take over what a peek has found; forget the calls of siblings that do not run any more."""
        mutation.require_live()
        for call in peeked:
            if self._is_current(call):
                self._take(call)
        gone = [rollout for rollout, held in self._held.items() if not self._is_running(rollout, held.record)]
        for rollout in gone:
            del self._held[rollout]

    def drop(self, mutation: Mutation, rollout: str) -> None:
        """Forget a call that is not to be continued; unknown ones are ignored."""
        mutation.require_live()
        self._held.pop(rollout, None)

    def of(self, rollout: str, *, attempt: int, turn: int) -> PartialCompletion | None:
        """What there is of a sibling's call of this turn, to be continued; None without a token."""
        held = self._held.get(rollout)
        if held is None or (held.record.attempt, held.record.turn) != (attempt, turn) or not len(held.tokens):
            return None
        return PartialCompletion(turn, held.record.prompt_digest, held.record.sampling, held.tokens.since(0))

    async def stage(self, *, in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread) -> None:
        """Make rows of all tokens that lie in none, off the event loop; calls that go on meanwhile lose nothing."""
        async with self._staging:
            behind = {r: held for r, held in self._held.items() if held.record.num_tokens < len(held.tokens)}
            if not behind:
                return
            staged: dict[str, _Held] = await in_thread(_staged, behind)
            for rollout, held in staged.items():
                newest, before = self._held.get(rollout), behind[rollout].tokens
                if newest is not None and newest.tokens.begins_with(before):
                    record = replace(held.record, finish_reason=newest.record.finish_reason)
                    parts = (*held.tokens.parts, *newest.tokens.parts[len(before.parts) :])
                    self._held[rollout] = _Held(record, CallTokens(parts, len(newest.tokens)), held.rows)

    def capture(
        self, cut: Cut, ledger: Sequence[LedgerGroup], episodes: Mapping[str, EpisodeRecord]
    ) -> tuple[tuple[PartialCall, ...], dict[str, RowHandle]]:
        """The calls that belong to the captured ledger and episodes (by rollout), with their rows by id.

        A call of a later turn belongs only to an episode that stands at this turn.
        """
        cut.require_live()
        records, rows = [], dict[str, RowHandle]()
        for group in ledger:
            for sibling in group.siblings if group.level.keeps_tokens else ():
                rollout = rollout_id(group.group_id, sibling.generation_index)
                held, episode = self._held.get(rollout), episodes.get(rollout)
                turn = len(self._ledger.staged(rollout)) if episode is None else episode.turn
                if held is None or not held.rows or (episode is None and turn):
                    continue
                record = held.record
                if sibling.status in _RUNNING and (record.attempt, record.turn) == (sibling.attempt, turn):
                    # What was found of its end belongs to tokens that may not lie in rows yet.
                    whole = record.num_tokens == len(held.tokens)
                    records.append(record if whole else replace(record, finish_reason=""))
                    rows.update(zip(record.chunks, held.rows, strict=True))
        return tuple(records), rows

    def load(self, mutation: Mutation, calls: Iterable[PartialCall], rows: Mapping[str, RowHandle]) -> None:
        """Replace everything by restored calls."""
        mutation.require_live()
        self._held = {}
        for call in calls:
            chunks = tuple(rows[chunk] for chunk in call.chunks)
            self._held[call.rollout_id] = _Held(call, CallTokens.of(list(map(_sampled_of, chunks))), chunks)

    def held(self) -> HeldTokens:
        """How much is known, of all calls that run or are to be continued."""
        tokens = [len(held.tokens) for r, held in self._held.items() if self._is_running(r, held.record)]
        return HeldTokens(len(tokens), sum(tokens))

    def _take(self, call: PeekedCall) -> None:
        """Another call of this turn than the held one was sampled anew: it counts once its generator has said so
        (`drop`), since a snapshot may hold the tokens that it does not go on from.
        """
        held = self._held.get(call.rollout_id)
        if held is not None and (held.record.attempt, held.record.turn) == (call.attempt, call.turn):
            grown = held.tokens.grown(call.start, call.sampled) if _is_same(held.record, call) else None
            if grown is not None:
                record = replace(held.record, finish_reason=call.finish_reason)
                self._held[call.rollout_id] = replace(held, record=record, tokens=grown)
            if grown is not None or len(held.tokens):
                return
        if call.start == 0:
            record = PartialCall(
                rollout_id=call.rollout_id,
                attempt=call.attempt,
                turn=call.turn,
                prompt_tokens=call.prompt_tokens,
                prompt_digest=call.prompt_digest,
                sampling=call.sampling,
                chunks=(),
                num_tokens=0,
                finish_reason=call.finish_reason,
            )
            self._held[call.rollout_id] = _Held(record, CallTokens.of([call.sampled]))

    def _sibling(self, rollout: str) -> Sibling | None:
        group_id, _, index = rollout.rpartition("_g")
        return self._ledger.group(group_id).siblings[int(index)] if group_id in self._ledger else None

    def _is_running(self, rollout: str, record: PartialCall) -> bool:
        sibling = self._sibling(rollout)
        return sibling is not None and sibling.status in _RUNNING and sibling.attempt == record.attempt


def _is_same(record: PartialCall, call: PeekedCall) -> bool:
    return (record.attempt, record.turn, record.prompt_digest, record.sampling) == (
        call.attempt,
        call.turn,
        call.prompt_digest,
        call.sampling,
    )


def _sampled_of(row: RowHandle) -> SampledTokens:
    """The tokens of a row of `PARTIAL_TOKENS`."""
    values = {name: row.batch.column(name)[row.index].values for name in ("token_ids", "logprobs")}
    spans = (tuple(row.batch.column(name)[row.index].as_py()) for name in ("version_starts", "versions"))
    return SampledTokens(
        np.asarray(values["token_ids"].to_numpy(), np.int32),
        np.asarray(values["logprobs"].to_numpy(), np.float32),
        *spans,
    )


def _staged(behind: Mapping[str, _Held]) -> dict[str, _Held]:
    """The same calls with all of their tokens in rows: one new row for each, all in one batch."""
    starts = [0 if len(held.rows) + 1 >= _MOST_ROWS else held.record.num_tokens for held in behind.values()]
    batch = _batch([_row(held, start) for held, start in zip(behind.values(), starts, strict=True)])
    staged = {}
    made = handles(RowKind.PARTIAL_TOKENS, batch)
    for (rollout, held), start, row in zip(behind.items(), starts, made, strict=True):
        rows = (*held.rows, row) if start else (row,)
        # From the rows, so that no token is held twice.
        parts = (*held.tokens.parts[: len(held.rows)], _sampled_of(row)) if start else (_sampled_of(row),)
        record = replace(held.record, chunks=tuple(one.row_id for one in rows), num_tokens=len(held.tokens))
        staged[rollout] = _Held(record, CallTokens(parts, len(held.tokens)), rows)
    return staged


def _row(held: _Held, start: int) -> dict[str, Any]:
    """The tokens of a call from index `start` on."""
    record, sampled = held.record, held.tokens.since(start)
    row: dict[str, Any] = {
        "row_id": partial_key(record.key, start=start, end=len(held.tokens)),
        "rollout_id": record.rollout_id,
        "group_id": record.rollout_id.rpartition("_g")[0],
        "attempt": record.attempt,
        "turn": record.turn,
        "start": start,
        "token_ids": sampled.token_ids,
        "logprobs": sampled.logprobs,
        "version_starts": sampled.version_starts,
        "versions": sampled.versions,
    }
    return row | {"digest": row_digest(RowKind.PARTIAL_TOKENS, row)}


def _batch(rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Without a Python number for each token, whose making would hold the interpreter up."""
    columns = [
        _lists([row[field.name] for row in rows], field.type)
        if field.name in ("token_ids", "logprobs")
        else pa.array([row[field.name] for row in rows], field.type)
        for field in PARTIAL_TOKENS
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PARTIAL_TOKENS)


def _lists(arrays: Sequence[NDArray[Any]], type_: pa.ListType) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)), type=type_)
