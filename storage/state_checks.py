"""What must hold in every rollout state, whether it is about to be written or was just read."""

from collections import Counter
from collections.abc import Iterable, Iterator

from storage.records import (
    AttemptStatus,
    BufferedGroup,
    EpisodeRecord,
    GroupPhase,
    GroupStatus,
    LedgerGroup,
    PartialCall,
    RolloutState,
    Sibling,
    partial_key,
    rollout_id,
)

_RUNNING = (AttemptStatus.DISPATCHED, AttemptStatus.RESUMED)
_FINISH_REASONS = ("", "stop", "length")
_MOST_DIGITS = 18  # of a number of tokens; Python refuses to read thousands of them


def defects(state: RolloutState) -> list[str]:
    """Every broken promise of the state, in words; empty when it is whole."""
    return [
        *_owned_once(state),
        *_rows_once(state),
        *(defect for group in state.ledger for defect in _ledger_group_defects(group)),
        *_batch_defects(state.ledger),
        *(defect for group in state.buffer for defect in _buffered_defects(group)),
        *(defect for trained in state.trained for defect in _buffered_defects(trained.group)),
        *_trained_defects(state),
        *_episode_defects(state),
        *_partial_call_defects(state),
    ]


def _owned_once(state: RolloutState) -> Iterator[str]:
    owners: dict[str, list[str]] = {}
    for owner, ids in (
        ("ledger", [group.group_id for group in state.ledger]),
        ("replay buffer", [group.group_id for group in state.buffer]),
        ("trained groups", [trained.group.group_id for trained in state.trained]),
        ("spare prompts", [prompt.group_id for prompt in state.spares]),
        ("dropped prompts", [dropped.prompt.group_id for dropped in state.dropped]),
    ):
        for group_id in ids:
            owners.setdefault(group_id, []).append(owner)
    for group_id, found in owners.items():
        if len(found) > 1:
            yield f"group {group_id} has {len(found)} owners: {', '.join(found)}"


def _rows_once(state: RolloutState) -> Iterator[str]:
    groups = [*state.buffer, *(trained.group for trained in state.trained)]
    yield from _duplicates("row", (row for group in groups for row in group.row_ids))
    sealed = [s.sealed for group in state.ledger for s in group.siblings if s.sealed is not None]
    kept = (key for episode in state.episodes for key in episode.calls)
    yield from _duplicates("staged call", (*(key for result in sealed for key in result.call_keys), *kept))


def _duplicates(what: str, ids: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(ids).items():
        if count > 1:
            yield f"{what} {name} is listed {count} times"


def _ledger_group_defects(group: LedgerGroup) -> Iterator[str]:
    indices = [sibling.generation_index for sibling in group.siblings]
    if indices != list(range(len(indices))) or not indices:
        yield f"group {group.group_id} has generation indices {indices}, expected 0, 1, ... without gaps"
    admitted = group.phase is GroupPhase.ADMITTED
    if admitted and group.start_version is None:
        yield f"group {group.group_id} is admitted without a start version"
    if not admitted and (group.target_step is not None or group.start_version is not None):
        yield f"group {group.group_id} is only reserved, but carries a stamp or a start version"
    sealed = [sibling.sealed is not None for sibling in group.siblings]
    if group.status is not GroupStatus.GENERATING and not all(sealed):
        yield f"group {group.group_id} is {group.status} with {sealed.count(False)} unsealed siblings"
    if group.status is GroupStatus.FINALIZATION_UNKNOWN:
        yield f"group {group.group_id} is {group.status}, which is never saved: its rows may or may not exist"
    for sibling in group.siblings:
        if (defect := _sibling_defect(sibling, admitted=admitted)) is not None:
            yield f"group {group.group_id}, sibling {sibling.generation_index}: {defect}"


def _sibling_defect(sibling: Sibling, *, admitted: bool) -> str | None:
    sealed = sibling.sealed
    if sibling.status is not AttemptStatus.SEALED:
        return f"is {sibling.status}, but holds a result" if sealed is not None else None
    if sealed is None:
        return "is sealed without a result"
    if len(sealed.call_keys) != len(sealed.digests) or not (sealed.call_keys or sealed.masked):
        return f"is sealed with {len(sealed.call_keys)} calls and {len(sealed.digests)} digests"
    if not admitted:
        return "is sealed although its group was never admitted"
    return None


def _batch_defects(ledger: Iterable[LedgerGroup]) -> Iterator[str]:
    """Groups of one batch share one admission."""
    first: dict[int, LedgerGroup] = {}
    for group in ledger:
        other = first.setdefault(group.batch, group)
        if (group.phase, group.target_step) != (other.phase, other.target_step):
            yield (
                f"groups {other.group_id} and {group.group_id} share batch {group.batch}, but are "
                f"{other.phase} for step {other.target_step} and {group.phase} for step {group.target_step}"
            )


def _buffered_defects(group: BufferedGroup) -> Iterator[str]:
    if len(group.row_ids) != len(group.rewards) or not group.row_ids:
        yield f"group {group.group_id} has {len(group.row_ids)} rows and {len(group.rewards)} rewards"


def _episode_defects(state: RolloutState) -> Iterator[str]:
    """An episode belongs to the running attempt of a sibling that is to be restored at its turns."""
    yield from _duplicates("episode of rollout", (episode.rollout_id for episode in state.episodes))
    owed = _owed(state)
    for episode in state.episodes:
        if episode.rollout_id not in owed:
            yield f"episode {episode.row_key} is of no sibling in the ledger"
            continue
        if (defect := _episode_defect(episode, *owed[episode.rollout_id])) is not None:
            yield f"episode {episode.row_key}: {defect}"


def _owed(state: RolloutState) -> dict[str, tuple[LedgerGroup, Sibling]]:
    """Every sibling of the ledger with its group, by rollout."""
    return {
        rollout_id(group.group_id, sibling.generation_index): (group, sibling)
        for group in state.ledger
        for sibling in group.siblings
    }


def _episode_defect(episode: EpisodeRecord, group: LedgerGroup, sibling: Sibling) -> str | None:
    if sibling.status not in _RUNNING:
        return f"its sibling is {sibling.status}"
    if not group.level.keeps_turns:
        return f"its group is restored at level {group.level}"
    if episode.attempt != sibling.environment_attempt:
        return f"the environment attempt of its sibling is {sibling.environment_attempt}"
    lengths = {len(episode.rewards), len(episode.calls), len(episode.weight_versions), episode.turn}
    if len(lengths) != 1:
        return f"{episode.turn} turns with {len(episode.rewards)} rewards and {len(episode.calls)} calls"
    return None


def _partial_call_defects(state: RolloutState) -> Iterator[str]:
    """A partial call is the one call that runs for a sibling that is to be restored with its tokens."""
    if not state.partial_calls:
        return
    yield from _duplicates("partial call of rollout", (call.rollout_id for call in state.partial_calls))
    owed, turns = _owed(state), {episode.rollout_id: episode.turn for episode in state.episodes}
    for call in state.partial_calls:
        if call.rollout_id not in owed:
            yield f"partial call {call.key} is of no sibling in the ledger"
            continue
        defect = _partial_call_defect(call, *owed[call.rollout_id], turns=turns.get(call.rollout_id, 0))
        if defect is not None:
            yield f"partial call {call.key}: {defect}"


def _partial_call_defect(call: PartialCall, group: LedgerGroup, sibling: Sibling, *, turns: int) -> str | None:
    if sibling.status not in _RUNNING:
        return f"its sibling is {sibling.status}"
    if not group.level.keeps_tokens:
        return f"its group is restored at level {group.level}"
    if call.attempt != sibling.attempt:
        return f"the attempt of its sibling is {sibling.attempt}"
    if call.turn != turns:
        return f"{turns} finished turns of its sibling are saved"
    if call.finish_reason not in _FINISH_REASONS:
        return f"it has finished for {call.finish_reason!r}, expected one of {', '.join(map(repr, _FINISH_REASONS))}"
    return _chunks_defect(call)


def _chunks_defect(call: PartialCall) -> str | None:
    """The ids of its chunks say which tokens they hold: all, in their order, and none twice."""
    end = 0
    for chunk in call.chunks:
        start, end_text = end, chunk.rpartition("-")[2]
        end = int(end_text) if end_text.isdecimal() and len(end_text) <= _MOST_DIGITS else start
        if end <= start or chunk != partial_key(call.key, start=start, end=end):
            return f"chunk {chunk} stands where its tokens from {start} on are expected"
    if end != call.num_tokens or not call.chunks:
        return f"{call.num_tokens} tokens in chunks that hold {end}"
    return None


def _trained_defects(state: RolloutState) -> Iterator[str]:
    yield from _duplicates("place", (f"{t.position} of step {t.step}" for t in state.trained))
    sizes, last = Counter(t.step for t in state.trained), state.progress.train_steps
    if sizes and len(sizes) != len(range(state.model_step + 1, last + 1)):
        yield f"trained groups are those of steps {sorted(sizes)[:9]}, which do not lead to step {last} without a gap"
    for trained in state.trained:
        if not 0 <= trained.position < sizes[trained.step]:
            yield (
                f"group {trained.group.group_id} has place {trained.position} of the {sizes[trained.step]} of step "
                f"{trained.step}"
            )
    for trained in state.trained:
        if trained.step > state.progress.train_steps:
            yield (
                f"group {trained.group.group_id} was trained in step {trained.step}, "
                f"but only {state.progress.train_steps} steps are committed"
            )
