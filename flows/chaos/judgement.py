"""What a scenario came to, by what lies in the store: a run that is trained, audited and whole, or a broken promise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.chaos.play import Played
from flows.chaos.scenario import Kind, Scenario
from flows.chaos.victims import Event
from storage.catalog import live_bundles
from storage.errors import MidflightError
from storage.fault_plan import Action, FaultPlan, Happened
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from storage.run_config import RunConfig
from storage.trace_analysis import stop_cost
from storage.trace_reader import read_events
from tasks.accounting import audit
from tasks.bundle_checks import BundleCheck, verify_run
from tasks.restore_drill import Drill

WENT_ON, RESUMED, BY_HAND, VIOLATION = "went on", "resumed", "resumed by hand", "VIOLATION"
_DAMAGES = frozenset({Action.TEAR, Action.FLIP})


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. `problems` are the promises that were broken.

    `tokens_lost` were sealed and had to be sampled again. `recover_s` is how long nothing was dispatched, over all
    stops; without a stop, the time from the fault to the next train step. None: there was no such moment.
    """

    kind: Kind
    seed: int
    fault: str
    outcome: str
    tokens_lost: int
    recover_s: float | None
    starts: int
    seconds: float
    problems: tuple[str, ...]


def judge(scenario: Scenario, config: RunConfig, played: Played, faults: Path, seconds: float) -> Result:
    """The result of a scenario that was played."""
    store, layout = open_store(config.store.url), RunLayout(config.name)
    plan = FaultPlan(faults, config.name)
    happened = plan.happened()
    problems = list(played.problems)
    problems += [
        f"fault {number} never happened: {fault}"
        for number, fault in enumerate(scenario.faults)
        if plan.faults is None or not plan.faults or not plan.spent(number)
    ]
    tokens_lost, recover_s = 0, None
    try:
        events: Sequence[Event] = read_events(store, layout)
        costs = stop_cost(store, layout)
        tokens_lost = sum(cost.tokens_lost for cost in costs)
        recover_s = sum(cost.down_s + (cost.to_first_dispatch_s or 0.0) for cost in costs) if costs else None
        if recover_s is None:
            recover_s = _until_a_step([*played.kills_at, *(fault.at for fault in happened)], events)
        problems += _broken_promises(store, layout, config, events, happened)
    except MidflightError as error:
        problems.append(f"{type(error).__name__}: {error}")
    return Result(
        kind=scenario.kind,
        seed=scenario.seed,
        fault=scenario.described,
        outcome=VIOLATION if problems else outcome_of(played),
        tokens_lost=tokens_lost,
        recover_s=recover_s,
        starts=played.starts,
        seconds=seconds,
        problems=tuple(problems),
    )


def outcome_of(played: Played) -> str:
    """Who started the run again, if it kept its promises."""
    if played.starts <= 1:
        return WENT_ON
    return BY_HAND if played.needed_a_person else RESUMED


def _broken_promises(
    store: Store, layout: RunLayout, config: RunConfig, events: Sequence[Event], happened: Sequence[Happened]
) -> Iterator[str]:
    """Every bundle is what its manifest says, but for files that were damaged; every prompt is accounted for."""
    algorithm = config.algorithm
    trained = max((int(event["step"]) for event in events if event["event"] == "train_step"), default=0)
    if trained != algorithm.max_steps:
        yield f"it trained {trained} of {algorithm.max_steps} steps"
    accounts = audit(store, layout)
    yield from accounts.problems
    expected = algorithm.max_steps * algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    if not accounts.owners["dropped"] and accounts.pairs_trained != expected:
        yield f"{accounts.pairs_trained} rollouts were trained, not {expected}, though no prompt was dropped"
    damaged = {fault.path for fault in happened if fault.action in _DAMAGES}
    log = {slot.sequence: slot for slot in read_log(store, layout) if isinstance(slot, Manifest)}
    for check in verify_run(store, layout, drill=Drill(), record=False).bad:
        if not _is_explained(check, log, layout, damaged):
            yield f"bundle {check.sequence}: {check.problem}"
    checkpoints, _ = live_bundles(list(log.values()))
    if not any(checkpoint.step == algorithm.max_steps for checkpoint in checkpoints):
        yield f"step {algorithm.max_steps} has no trainer checkpoint"


def _is_explained(check: BundleCheck, log: dict[int, Manifest], layout: RunLayout, damaged: set[str]) -> bool:
    """Whether a bundle is bad because of a file that was damaged on purpose: its manifest, its own, or its anchor's."""
    manifest = log.get(check.sequence)
    if manifest is None:
        return layout.manifest(check.sequence) in damaged
    paths = {entry.path for entry in manifest.files}
    if manifest.anchor is not None and manifest.anchor.sequence is not None:
        anchor = log.get(manifest.anchor.sequence)
        paths |= {layout.manifest(manifest.anchor.sequence)} if anchor is None else {e.path for e in anchor.files}
    return bool(paths & damaged)


def _until_a_step(faults_at: Sequence[float], events: Sequence[Event]) -> float | None:
    """The longest time from a fault to the next train step."""
    steps = [float(event["t"]) for event in events if event["event"] == "train_step"]
    waits = [min((step - at for step in steps if step > at), default=None) for at in faults_at]
    return max((wait for wait in waits if wait is not None), default=None)
