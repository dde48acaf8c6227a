"""Exactly-once accounting: from trace, manifests and dataset alone, what became of every prompt and every row.

Every prompt that the source has passed has exactly one owner; nothing was trained twice; what was trained was sealed;
every drop is explained; tokens are of weights that were there. All lives of the run are looked at, also those whose
work a restore rolled back.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from storage.audit_evidence import Evidence, compare_bundles
from storage.audit_findings import Finding, findings, named
from storage.catalog import live_bundles, select
from storage.filesystem import Store
from storage.history import Event, History, Standing, steps_of
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from storage.records import Progress, PromptRef, RolloutState, rollout_id
from storage.runs import Log
from storage.snapshot_reader import read_bundle
from storage.trace_reader import read_events


@dataclass(frozen=True, slots=True)
class Audit:
    """What became of every prompt up to the frontier of the newest valid bundle, and of every row that was trained.

    `owners` counts groups by owner: trained, replay_buffer, ledger, spare_prompts, dropped. `pairs_trained` counts
    (prompt, epoch, generation), each time it was trained; `pairs_sealed` how many of them have a traced result. Steps
    that a restore undid are in `steps_rolled_back` and nowhere else, whether their recorded batches were trained again
    or their prompts were generated anew. `replayed_otherwise` are steps that were to be trained again from a recorded
    batch, but got another one. The events of `lives` processes were compared with each other and with `bundles`
    (sequences); the bundles `unread` are damaged. `unproven` needs events that a kill or a store may have lost.
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


def account(store: Store, layout: RunLayout, *, order: Callable[[int], Sequence[int]]) -> Audit:
    """Account for every prompt. `order(epoch)` gives the dataset's prompt ids in the order of that epoch.

    Raises: NoRestorableState when the store holds bundles and none is valid; SnapshotCorrupt for a damaged
    trace; StoreUnavailable.
    """
    # The bundle before the trace: a run that goes on meanwhile then only adds to what led to it.
    target = select(store, layout).target
    state = RolloutState(Progress()) if target is None else read_bundle(store, layout, target).state
    events, log = read_events(store, layout), read_log(store, layout)
    history = History(events, log)
    standing = history.now() if target is None else history.at_cut(target.sequence)
    owners = _owners(state, standing)
    owned = Counter(group for groups in owners.values() for group in groups)
    frontier = _frontier(state, order)
    now = history.now()
    pairs = _pairs(now, events)
    known = {step.step for step in standing.steps} | {trained.step for trained in state.trained}
    skipped = tuple(group for group in frontier if group not in owned)
    missing = tuple(step for step in range(1, state.progress.train_steps + 1) if step not in known)
    evidence = Evidence(history)
    whole = target is None or evidence.is_whole_up_to(target)
    compared = compare_bundles(store, layout, [] if target is None else _bundles_until(log, target), evidence)
    unsealed = list(evidence.unsealed(pairs))
    judged = [*evidence.of_lives(), *compared.judged, *unsealed]
    return Audit(
        sequence=None if target is None else target.sequence,
        frontier=len(frontier),
        owners={owner: len(groups) for owner, groups in owners.items()},
        pairs_trained=pairs.total(),
        pairs_sealed=pairs.total() - sum(pairs[suspicion.about] for suspicion, _ in unsealed),
        trained_twice=tuple(pair for pair, count in pairs.items() if count > 1),
        skipped=skipped if whole else (),
        owned_twice=tuple(group for group, count in owned.items() if count > 1),
        beyond_frontier=tuple(owned.keys() - set(frontier)) if target is not None else (),
        missing_steps=missing if whole else (),
        replayed_otherwise=tuple(_replayed_otherwise([event for life in history.lives for event in life.events])),
        steps_rolled_back=sum(1 for _ in steps_of(events)) - len(now.steps),
        events=sum(len(life.events) for life in history.lives),
        lives=len(history.lives),
        bundles=compared.read,
        unread=compared.unread,
        inconsistent=findings(suspicion for suspicion, proven in judged if proven),
        unproven=(
            *(() if whole else named({"prompts skipped": skipped, "steps without a trace": missing})),
            *findings(suspicion for suspicion, proven in judged if not proven),
        ),
    )


def _bundles_until(log: Log, target: Manifest) -> list[Manifest]:
    """Later ones were published after the target was chosen, or are not valid."""
    checkpoints, snapshots = live_bundles(log)
    return [bundle for bundle in (*checkpoints, *snapshots) if bundle.sequence <= target.sequence]


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


def _frontier(state: RolloutState, order: Callable[[int], Sequence[int]]) -> list[str]:
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
