"""What a bundle holds against what the trace says led to it: groups, results, drops, recorded batches and rows."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from storage.audit_findings import Needs, Suspicion
from storage.history import Event, Segment
from storage.life_checks import LifeEvents
from storage.records import (
    AttemptStatus,
    BufferedGroup,
    DroppedPrompt,
    LedgerGroup,
    RolloutState,
    SealedSibling,
    Sibling,
    TrainedGroup,
    rollout_id,
)
from storage.rows import RowHandle
from storage.snapshot_reader import RestoredBundle
from storage.trace_index import DROPS, STARTS, TraceIndex

_NOT_SAMPLED = -1
_SEALED_OTHERWISE = "results in bundles that differ from what was sealed"
_PUBLISHED_OTHERWISE = "groups in bundles that differ from what was published"


def bundle_suspicions(bundle: RestoredBundle, events: LifeEvents, segments: Sequence[Segment]) -> Iterator[Suspicion]:
    """All that a bundle holds and the trace does not say. `events`: those of its writer. `segments`: the writer up
    to the cut, and what it stands on.
    """
    state, trace = bundle.state, events.own.over(events.below)
    for group in (*state.buffer, *(trained.group for trained in state.trained)):
        yield from _finished(group, bundle.rows, trace)
    yield from _recorded(state.trained, bundle.rows, trace)
    for unfinished in state.ledger:
        yield from _unfinished(unfinished, events, trace)
        yield from _mixed(unfinished, bundle.rows)
    yield from _partial_calls(bundle, trace, copied=events.copied)
    yield from _dropped(state.dropped, trace)
    yield from _drops_undone(state, segments)


def _finished(group: BufferedGroup, rows: Mapping[str, RowHandle], trace: TraceIndex) -> Iterator[Suspicion]:
    """A finished group was published as it is: its rows, rewards, tokens and versions."""
    published = trace.of(group.group_id, "group_published")
    if not published:
        yield Suspicion("groups in bundles that were never published", group.group_id, Needs.BELOW)
    elif not any(_is_publication(event, group, rows) for event in published):
        yield Suspicion(_PUBLISHED_OTHERWISE, group.group_id, Needs.BELOW)
    own = [rows[row_id] for row_id in group.row_ids]
    for row in own:
        results = trace.of(row.row_id, "attempt_sealed")
        if results and not any(int(event["attempt"]) == _attempt_of(row) for event in results):
            yield Suspicion("rows of other attempts than were sealed", row.row_id, Needs.BELOW)
    if _version_tokens(own) != dict(group.version_tokens):
        yield Suspicion("groups whose rows have other token versions than their record", group.group_id)


def _is_publication(event: Event, group: BufferedGroup, rows: Mapping[str, RowHandle]) -> bool:
    """What an event does not tell, it does not contradict."""
    told = {
        "version_tokens": [list(pair) for pair in group.version_tokens],
        "num_tokens": group.num_tokens,
        "rollout_sha256": rows_sha256(rows[row_id].digest for row_id in group.row_ids),
    }
    same_rewards = [np.float32(r) for r in event["rewards"]] == [np.float32(r) for r in group.rewards]
    return same_rewards and all(event.get(name, value) == value for name, value in told.items())


def rows_sha256(digests: Iterable[str]) -> str:
    """What the trace calls `rollout_sha256` and `rollouts_sha256`: sha256 (hex) over row digests in their order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _version_tokens(rows: Iterable[RowHandle]) -> dict[int, int]:
    """Sampled tokens by weight version, from the spans of rows that are not masked."""
    found: dict[int, int] = {}
    names = ("token_ids", "version_starts", "versions", "masked")
    for row in rows:
        tokens, starts, versions, masked = (row.batch.column(name)[row.index].as_py() for name in names)
        for start, end, version in zip(starts, [*starts[1:], len(tokens)], versions, strict=True):
            if version != _NOT_SAMPLED and not masked and end > start:
                found[version] = found.get(version, 0) + end - start
    return found


def _recorded(trained: Sequence[TrainedGroup], rows: Mapping[str, RowHandle], trace: TraceIndex) -> Iterator[Suspicion]:
    """A recorded batch is what the step was trained on, in its order."""
    for step in sorted({entry.step for entry in trained}):
        batch = sorted((entry for entry in trained if entry.step == step), key=lambda entry: entry.position)
        groups = [entry.group.group_id for entry in batch]
        digest = rows_sha256(rows[row_id].digest for entry in batch for row_id in entry.group.row_ids)
        told = trace.of(str(step), "train_step")
        if not told:
            yield Suspicion("recorded batches of steps that were not traced", str(step), Needs.BELOW)
        elif not any(
            list(event["group_ids"]) == groups and event.get("rollouts_sha256", digest) == digest for event in told
        ):
            yield Suspicion("recorded batches that differ from what was trained", str(step), Needs.BELOW)


def _unfinished(group: LedgerGroup, events: LifeEvents, trace: TraceIndex) -> Iterator[Suspicion]:
    """A promise was reserved, what runs was dispatched, and what is sealed was sealed so."""
    copied = events.copied
    if not events.is_promised(group.group_id):
        yield Suspicion("groups in bundles that were never reserved", group.group_id, Needs.BELOW)
    for sibling in group.siblings:
        rollout = rollout_id(group.group_id, sibling.generation_index)
        if sibling.sealed is not None:
            results = trace.of(rollout, "attempt_sealed")
            if not results and not copied:
                yield Suspicion("results in bundles that were never sealed", rollout, Needs.BELOW)
            elif results and not any(_is_result(event, sibling, sibling.sealed) for event in results):
                yield Suspicion(_SEALED_OTHERWISE, rollout, Needs.BELOW)
        elif sibling.status is AttemptStatus.DISPATCHED:
            starts = {event["attempt"] for event in trace.of(rollout, *STARTS)}
            if sibling.attempt not in starts and not copied:
                yield Suspicion("running attempts in bundles that were never dispatched", rollout, Needs.BELOW)


def _mixed(group: LedgerGroup, rows: Mapping[str, RowHandle]) -> Iterator[Suspicion]:
    """Every call of a result is of the one attempt that it is of."""
    for sibling in group.siblings:
        keys = () if sibling.sealed is None else sibling.sealed.call_keys
        if any(_attempt_of(rows[key]) != sibling.attempt for key in keys):
            rollout = rollout_id(group.group_id, sibling.generation_index)
            yield Suspicion("results with calls of several attempts", rollout)


def _attempt_of(row: RowHandle) -> int:
    return int(row.batch.column("attempt")[row.index].as_py())


def _partial_calls(bundle: RestoredBundle, trace: TraceIndex, *, copied: bool) -> Iterator[Suspicion]:
    """A call runs for an attempt that was started, and no token of it is of weights to come."""
    newest = bundle.state.progress.train_steps
    for call in bundle.state.partial_calls:
        starts = {int(event["attempt"]) for event in trace.of(call.rollout_id, *STARTS)}
        if call.attempt not in starts and not copied:
            yield Suspicion("partial calls of attempts that were never dispatched", call.key, Needs.BELOW)
        rows = (bundle.rows[chunk] for chunk in call.chunks)
        if any(max(row.batch.column("versions")[row.index].as_py()) > newest for row in rows):
            yield Suspicion("partial calls with tokens of weights to come", call.key)


def _is_result(event: Event, sibling: Sibling, sealed: SealedSibling) -> bool:
    told = {"attempt": sibling.attempt, "num_tokens": sealed.num_tokens, "digest": sealed.digests[-1]}
    rewards = np.float32(event.get("reward", sealed.reward)) == np.float32(sealed.reward)
    return bool(rewards) and all(event.get(name, value) == value for name, value in told.items())


def _dropped(dropped: Sequence[DroppedPrompt], trace: TraceIndex) -> Iterator[Suspicion]:
    """Every drop is explained, and as the trace explains it."""
    for drop in dropped:
        told = trace.of(drop.prompt.group_id, *DROPS)
        if not told:
            yield Suspicion("dropped prompts without a traced reason", drop.prompt.group_id, Needs.BELOW)
        elif not drop.reason or drop.reason not in [event["reason"] for event in told]:
            yield Suspicion("dropped prompts with another reason than traced", drop.prompt.group_id, Needs.BELOW)


def _drops_undone(state: RolloutState, segments: Sequence[Segment]) -> Iterator[Suspicion]:
    """A prompt that was dropped before the cut stays dropped."""
    dropped = {drop.prompt.group_id for drop in state.dropped}
    for segment in segments:
        for event in segment.life.events:
            if event["event"] in DROPS and float(event["t"]) < segment.cut_time and event["group_id"] not in dropped:
                yield Suspicion("traced drops that the bundle does not hold", event["group_id"])
