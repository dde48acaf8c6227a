"""Tokens of running model calls, by rollout: taken over from peeks, made into rows before a cut, captured under it.

    peeked --extend--> held --stage--> rows --capture--> saved --load--> held --of--> continued

A call's tokens only grow, so that those of a peek are a prefix of whatever the call comes to. What the ledger says of a
sibling decides which of them count: entries of siblings that are sealed, or that run another call by now, are nobody's.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from gpu_workers.controller.barrier import Cut, Mutation
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
    """One call. `record` describes the tokens that lie in `rows`, the first ones of `sampled`."""

    record: PartialCall
    sampled: SampledTokens
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
        return KnownCall(sibling.environment_attempt, held.record.turn, len(held.sampled))

    def is_news(self, call: PeekedCall) -> bool:
        """Whether it has a token, or an end, that is not known."""
        held = self._held.get(call.rollout_id)
        if held is None or not _is_same(held.record, call):
            return bool(len(call.sampled) or call.finish_reason)
        return call.start + len(call.sampled) != len(held.sampled) or call.finish_reason != held.record.finish_reason

    def extend(self, mutation: Mutation, peeked: Iterable[PeekedCall]) -> None:
        """Take over what a peek has found; forget the calls of siblings that do not run any more."""
        mutation.require_live()
        for call in peeked:
            sibling = self._sibling(call.rollout_id)
            if sibling is not None and sibling.attempt == call.attempt:
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
        if held is None or (held.record.attempt, held.record.turn) != (attempt, turn) or not len(held.sampled):
            return None
        return PartialCompletion(turn, held.record.prompt_digest, held.record.sampling, held.sampled)

    async def stage(self) -> None:
        """Make rows of all tokens that lie in none, off the event loop; calls that go on meanwhile lose nothing."""
        async with self._staging:
            behind = {r: held for r, held in self._held.items() if held.record.num_tokens < len(held.sampled)}
            if not behind:
                return
            staged = await asyncio.to_thread(_staged, behind)
            for rollout, held in staged.items():
                newest = self._held.get(rollout)
                if newest is not None and newest.record == behind[rollout].record:
                    record = replace(held.record, finish_reason=newest.record.finish_reason)
                    self._held[rollout] = replace(held, record=record, sampled=newest.sampled)

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
                    whole = record.num_tokens == len(held.sampled)
                    records.append(record if whole else replace(record, finish_reason=""))
                    rows.update(zip(record.chunks, held.rows, strict=True))
        return tuple(records), rows

    def load(self, mutation: Mutation, calls: Iterable[PartialCall], rows: Mapping[str, RowHandle]) -> None:
        """Replace everything by restored calls."""
        mutation.require_live()
        self._held = {}
        for call in calls:
            chunks = tuple(rows[chunk] for chunk in call.chunks)
            self._held[call.rollout_id] = _Held(call, _joined([_sampled_of(chunk) for chunk in chunks]), chunks)

    def held(self) -> HeldTokens:
        """How much is known, of all calls that run or are to be continued."""
        sampled = [len(held.sampled) for r, held in self._held.items() if self._is_running(r, held.record)]
        return HeldTokens(len(sampled), sum(sampled))

    def _take(self, call: PeekedCall) -> None:
        held = self._held.get(call.rollout_id)
        if held is not None and _is_same(held.record, call):
            grown = _grown(held.sampled, call)
            if grown is not None:
                record = replace(held.record, finish_reason=call.finish_reason)
                self._held[call.rollout_id] = replace(held, record=record, sampled=grown)
                return
        self._held.pop(call.rollout_id, None)
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
            self._held[call.rollout_id] = _Held(record, call.sampled)

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


def _grown(held: SampledTokens, call: PeekedCall) -> SampledTokens | None:
    """The held tokens with those that the call has beyond them; None when these are not its first ones."""
    known, found = len(held), call.start + len(call.sampled)
    if call.start > known or found < known:
        return None
    overlap = known - call.start
    old, new = _part(held, call.start, known), _part(call.sampled, 0, overlap)
    if not (np.array_equal(old.token_ids, new.token_ids) and np.array_equal(old.logprobs, new.logprobs)):
        return None
    return held if found == known else _joined([held, _part(call.sampled, overlap, len(call.sampled))])


def _part(sampled: SampledTokens, start: int, end: int) -> SampledTokens:
    """Tokens `start` to `end` (exclusive), with their spans."""
    if start >= end:
        return SampledTokens(sampled.token_ids[:0], sampled.logprobs[:0], (), ())
    spans = list(zip(sampled.version_starts, sampled.versions, strict=True))
    before = [span for span in spans if span[0] <= start][-1:]
    inside = [span for span in spans if start < span[0] < end]
    return SampledTokens(
        sampled.token_ids[start:end],
        sampled.logprobs[start:end],
        tuple(max(first - start, 0) for first, _ in before + inside),
        tuple(version for _, version in before + inside),
    )


def _joined(parts: Sequence[SampledTokens]) -> SampledTokens:
    """All tokens one after the other; neighbouring spans of one version are one span."""
    starts: list[int] = []
    versions: list[int] = []
    length = 0
    for part in parts:
        for start, version in zip(part.version_starts, part.versions, strict=True):
            if not versions or versions[-1] != version:
                starts.append(length + start)
                versions.append(version)
        length += len(part)
    return SampledTokens(
        np.concatenate([part.token_ids for part in parts]) if parts else np.empty(0, np.int32),
        np.concatenate([part.logprobs for part in parts]) if parts else np.empty(0, np.float32),
        tuple(starts),
        tuple(versions),
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
    rows: list[dict[str, Any]] = []
    for held in behind.values():
        record, end = held.record, len(held.sampled)
        start = 0 if len(record.chunks) + 1 >= _MOST_ROWS else record.num_tokens
        part = _part(held.sampled, start, end)
        row: dict[str, Any] = {
            "row_id": partial_key(record.key, start=start, end=end),
            "rollout_id": record.rollout_id,
            "group_id": record.rollout_id.rpartition("_g")[0],
            "attempt": record.attempt,
            "turn": record.turn,
            "start": start,
            "token_ids": part.token_ids,
            "logprobs": part.logprobs,
            "version_starts": part.version_starts,
            "versions": part.versions,
        }
        row["digest"] = row_digest(RowKind.PARTIAL_TOKENS, row)
        rows.append(row)
    columns = {name: [row[name] for row in rows] for name in PARTIAL_TOKENS.names}
    batch = pa.RecordBatch.from_pydict(columns, schema=PARTIAL_TOKENS)
    staged = {}
    for (rollout, held), handle in zip(behind.items(), handles(RowKind.PARTIAL_TOKENS, batch), strict=True):
        anew = batch.column("start")[handle.index].as_py() == 0
        chunks = (() if anew else held.record.chunks) + (handle.row_id,)
        record = replace(held.record, chunks=chunks, num_tokens=len(held.sampled))
        staged[rollout] = _Held(record, held.sampled, (() if anew else held.rows) + (handle,))
    return staged
