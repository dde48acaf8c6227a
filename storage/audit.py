"""Exactly-once accounting: from trace, manifests and dataset alone, what became of every prompt and every row.

Every prompt that the source has passed has exactly one owner; nothing was trained twice; what was trained was sealed;
every drop is explained; tokens are of weights that were there. All lives of the run are looked at, also those whose
work a restore rolled back.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from storage.audit_evidence import Evidence
from storage.audit_findings import Finding, findings, named
from storage.catalog import live_bundles, select
from storage.errors import FormatUnsupported, SnapshotCorrupt
from storage.filesystem import Store
from storage.history import Event, History, Standing, steps_of
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from storage.records import Progress, PromptRef, RolloutState, rollout_id
from storage.runs import Log
from storage.snapshot_reader import RestoredBundle, read_bundle
from storage.trace_reader import read_events

# The prompt ids of an epoch, in the order in which the source hands them out.
Order = Callable[[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Audit:
    """What became of every prompt up to the frontier of the newest valid bundle, and of every row that was trained.

    `owners` counts groups by owner: trained, replay_buffer, ledger, spare_prompts, dropped. `pairs_trained` counts
    (prompt, epoch, generation), each time it was trained; `pairs_sealed` how many of them have a traced result. Steps
    that a restore undid are in `steps_rolled_back` and nowhere else, whether their recorded batches were trained again
    or their prompts were generated anew. `replayed_otherwise` are steps that were to be trained again from a recorded
    batch, but got another one. The events of `lives` processes were compared with each other and with `bundles`
    (sequences); the bundles `unread` are damaged. `calls_compared` running model calls of a bundle were found again in
    later ones, and held against what they came to. `unproven` needs events that a kill or a store may have lost.
    """

    sequence: int | None
    frontier: int
    owners: dict[str, int]
    pairs_trained: int
    pairs_sealed: int
    trained_twice: tuple[str, ...]
    skipped: tuple[str, ...]
    owned_twice: tuple[str, ...]
    beyond_frontier: tuple[str, ...]
    missing_steps: tuple[int, ...]
    replayed_otherwise: tuple[int, ...]
    steps_rolled_back: int
    events: int
    lives: int
    bundles: tuple[int, ...]
    calls_compared: int
    unread: tuple[int, ...]
    inconsistent: tuple[Finding, ...]
    unproven: tuple[Finding, ...]

    @property
    def found(self) -> tuple[Finding, ...]:
        """Every broken promise with all that break it."""
        ownership = {
            "rollouts trained twice": self.trained_twice,
            "prompts skipped": self.skipped,
            "groups with two owners": self.owned_twice,
            "groups that the source has not handed out": self.beyond_frontier,
            "steps without a trace": self.missing_steps,
            "recorded batches replaced by others": self.replayed_otherwise,
        }
        return (*named(ownership), *self.inconsistent)

    @property
    def problems(self) -> list[str]:
        """Every broken promise in words; empty when each prompt was trained at most once and none was skipped."""
        return [str(finding) for finding in self.found]


def account(store: Store, layout: RunLayout, *, order: Order) -> Audit:
    """Account for every prompt. `order(epoch)` gives the dataset's prompt ids in the order of that epoch.

    Raises: NoRestorableState when the store holds bundles and none is valid; SnapshotCorrupt for a damaged
    trace; StoreUnavailable.
    """
    # The bundle before the trace: a run that goes on meanwhile then only adds to what led to it.
    target = select(store, layout).target
    newest = None if target is None else read_bundle(store, layout, target)
    events, log = read_events(store, layout), read_log(store, layout)
    older = [] if target is None else _bundles_before(log, target)
    audit = account_for(History(events, log), newest, _readable(store, layout, older), order=order)
    return replace(audit, unread=tuple(bundle.sequence for bundle in older if bundle.sequence not in audit.bundles))


def account_for(
    history: History, newest: RestoredBundle | None, older: Iterable[RestoredBundle], *, order: Order
) -> Audit:
    """Account for every prompt up to the frontier of the newest bundle, and compare older ones with the trace too."""
    state = RolloutState(Progress()) if newest is None else newest.state
    standing = history.now() if newest is None else history.at_cut(newest.manifest.sequence)
    owners = _owners(state, standing)
    owned = Counter(group for groups in owners.values() for group in groups)
    frontier, now = _frontier(state, order), history.now()
    events = [event for life in history.lives for event in life.events]
    pairs = _pairs(now, events)
    known = {step.step for step in standing.steps} | {trained.step for trained in state.trained}
    absent = {
        "prompts skipped": tuple(group for group in frontier if group not in owned),
        "steps without a trace": tuple(str(s) for s in range(1, state.progress.train_steps + 1) if s not in known),
    }
    evidence = Evidence(history)
    replaced, told = tuple(_replayed_otherwise(events)), evidence.is_whole_for_replays()
    whole = newest is None or evidence.is_whole_up_to(newest.manifest)
    unsealed = list(evidence.unsealed(pairs))
    judged, compared = [*evidence.of_lives(), *unsealed], list[int]()
    for bundle in (*older, *(() if newest is None else (newest,))):
        judged += evidence.of_bundle(bundle)
        compared.append(bundle.manifest.sequence)
    return Audit(
        sequence=None if newest is None else newest.manifest.sequence,
        frontier=len(frontier),
        owners={owner: len(groups) for owner, groups in owners.items()},
        pairs_trained=pairs.total(),
        pairs_sealed=pairs.total() - sum(pairs[suspicion.about] for suspicion, _ in unsealed),
        trained_twice=tuple(pair for pair, count in pairs.items() if count > 1),
        skipped=absent["prompts skipped"] if whole else (),
        owned_twice=tuple(group for group, count in owned.items() if count > 1),
        beyond_frontier=tuple(owned.keys() - set(frontier)) if newest is not None else (),
        missing_steps=tuple(map(int, absent["steps without a trace"])) if whole else (),
        replayed_otherwise=replaced if told else (),
        steps_rolled_back=sum(1 for _ in steps_of(history.events)) - len(now.steps),
        events=sum(len(life.events) for life in history.lives),
        lives=len(history.lives),
        bundles=tuple(compared),
        calls_compared=evidence.calls_compared,
        unread=(),
        inconsistent=findings(suspicion for suspicion, proven in judged if proven),
        unproven=(
            *(() if whole else named(absent)),
            *(() if told else named({"recorded batches replaced by others": replaced})),
            *findings(suspicion for suspicion, proven in judged if not proven),
        ),
    )


def _bundles_before(log: Log, target: Manifest) -> list[Manifest]:
    """Later ones were published after the target was chosen, or are not valid."""
    checkpoints, snapshots = live_bundles(log)
    older = (bundle for bundle in (*checkpoints, *snapshots) if bundle.sequence < target.sequence)
    return sorted(older, key=lambda bundle: bundle.sequence)


def _readable(store: Store, layout: RunLayout, bundles: Iterable[Manifest]) -> Iterator[RestoredBundle]:
    """One after the other; what is damaged is for a verification to report."""
    for bundle in bundles:
        with contextlib.suppress(SnapshotCorrupt, FormatUnsupported):
            yield read_bundle(store, layout, bundle)


def _owners(state: RolloutState, standing: Standing) -> dict[str, list[str]]:
    """Group ids by owner. Up to the bundle's model the trace says what was trained, after it the recorded batches."""
    recorded = {trained.step for trained in state.trained}
    trained = [group for step in standing.steps if step.step not in recorded for group in step.group_ids]
    trained += [entry.group.group_id for entry in state.trained]
    return {
        "trained": trained,
        "replay_buffer": [group.group_id for group in state.buffer],
        "ledger": [group.group_id for group in state.ledger],
        "spare_prompts": [prompt.group_id for prompt in state.spares],
        "dropped": [dropped.prompt.group_id for dropped in state.dropped],
    }


def _frontier(state: RolloutState, order: Order) -> list[str]:
    """Ids of the groups of every prompt that the source has passed."""
    source = state.progress.source
    passed = [(epoch, list(order(epoch))) for epoch in range(source.epoch)]
    if source.offset:
        passed.append((source.epoch, list(order(source.epoch)[: source.offset])))
    return [PromptRef(int(prompt), epoch, "").group_id for epoch, prompts in passed for prompt in prompts]


def _replayed_otherwise(events: Sequence[Event]) -> Iterator[int]:
    """Steps that were trained again from a recorded batch, with other rollouts than the time before."""
    before: dict[int, tuple[list[str], str]] = {}
    for event in events:
        if event["event"] == "train_step":
            step, batch = int(event["step"]), (list(event["group_ids"]), event.get("rollouts_sha256", ""))
            if event.get("replayed") and before.get(step, batch) != batch:
                yield step
            before[step] = batch


def _pairs(standing: Standing, events: Sequence[Event]) -> Counter[str]:
    """How often each (prompt, epoch, generation), written as its rollout id, was trained in effective steps."""
    siblings = {e["group_id"]: len(e["rewards"]) for e in events if e["event"] == "group_published"}
    return Counter(
        rollout_id(group, index)
        for step in standing.steps
        for group in step.group_ids
        for index in range(siblings.get(group, 1))
    )
