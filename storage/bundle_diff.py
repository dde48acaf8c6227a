"""What happened between two bundles: which groups appeared and moved on, and which configuration keys changed."""

from dataclasses import dataclass
from typing import Any

from storage.identity import differences, with_defaults
from storage.records import RolloutState, rollout_id
from storage.snapshot_reader import RestoredBundle


@dataclass(frozen=True, slots=True)
class BundleDiff:
    """From bundle A to bundle B. Group ids and rollout ids are sorted; a group can be in several of them.

    `appeared`: groups that A does not know. `sealed`: siblings with a result in B and none in A. `published`: groups
    that became finished ones. `trained`: groups that a step took, as B's recorded batches say or because B has passed
    them. `dropped`: prompts given up. `calls_went_on`: running model calls (by key) of which B has more tokens than A.
    `calls_ended`: those of A that B has not. `absent`: groups of A that B has not come to: B is the older one, or lies
    on another branch. `config`: differing keys with both values. `counts`: counters that differ, as (A, B).
    """

    appeared: tuple[str, ...]
    sealed: tuple[str, ...]
    published: tuple[str, ...]
    trained: tuple[str, ...]
    dropped: tuple[str, ...]
    calls_went_on: tuple[str, ...]
    calls_ended: tuple[str, ...]
    absent: tuple[str, ...]
    config: tuple[str, ...]
    counts: dict[str, tuple[int, int]]


def diff_bundles(a: RestoredBundle, b: RestoredBundle) -> BundleDiff:
    """What B has that A has not, and the other way round."""
    before, now = owners_of(a.state), owners_of(b.state)
    passed = before.keys() - now.keys() - _of("dropped", before) - _of("trained", before)
    # A group has one owner until it is trained and its step durable; only then does no table name it any more.
    went_on = b.state.progress.train_steps > a.state.progress.train_steps
    known = _of("trained", before)
    calls, had = _calls(b.state), _calls(a.state)
    return BundleDiff(
        appeared=_ids(now.keys() - before.keys()),
        sealed=_ids(_sealed(b.state) - _sealed(a.state)),
        published=_ids(_of("replay_buffer", now) - _of("replay_buffer", before) - known),
        trained=_ids((_of("trained", now) - known) | (passed if went_on else set())),
        dropped=_ids(_of("dropped", now) - _of("dropped", before)),
        calls_went_on=_ids({call for call, tokens in calls.items() if tokens > had.get(call, 0)}),
        calls_ended=_ids(had.keys() - calls.keys()),
        absent=() if went_on else _ids(passed),
        config=tuple(differences(_config(a), _config(b))),
        counts=_counts(a, b),
    )


def owners_of(state: RolloutState) -> dict[str, str]:
    """The owner of each group of a state: ledger, replay_buffer, trained, spare_prompts or dropped."""
    owners = {group.group_id: "ledger" for group in state.ledger}
    owners |= {group.group_id: "replay_buffer" for group in state.buffer}
    owners |= {entry.group.group_id: "trained" for entry in state.trained}
    owners |= {prompt.group_id: "spare_prompts" for prompt in state.spares}
    return owners | {entry.prompt.group_id: "dropped" for entry in state.dropped}


def _of(owner: str, owners: dict[str, str]) -> set[str]:
    return {group for group, found in owners.items() if found == owner}


def _sealed(state: RolloutState) -> set[str]:
    """Rollout ids of siblings that have a result, in whatever owner."""
    finished = [*state.buffer, *(entry.group for entry in state.trained)]
    sealed = {row for group in finished for row in group.row_ids}
    return sealed | {
        rollout_id(group.group_id, sibling.generation_index)
        for group in state.ledger
        for sibling in group.siblings
        if sibling.sealed is not None
    }


def _calls(state: RolloutState) -> dict[str, int]:
    """Tokens of each running model call, by its key."""
    return {call.key: call.num_tokens for call in state.partial_calls}


def _config(bundle: RestoredBundle) -> dict[str, Any]:
    """The saved configuration; keys that came later have their defaults."""
    return {key: value for key, value in with_defaults(bundle.manifest.config).items() if key != "name"}


def _counts(a: RestoredBundle, b: RestoredBundle) -> dict[str, tuple[int, int]]:
    progress = ("train_steps", "trainer_version", "sampler_cursor", "next_batch", "next_order")
    before = {name: getattr(a.state.progress, name) for name in progress} | a.manifest.counts
    now = {name: getattr(b.state.progress, name) for name in progress} | b.manifest.counts
    names = sorted(before.keys() | now.keys())
    return {name: (before.get(name, 0), now.get(name, 0)) for name in names if before.get(name, 0) != now.get(name, 0)}


def _ids(ids: set[str]) -> tuple[str, ...]:
    return tuple(sorted(ids))
