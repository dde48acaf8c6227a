"""What a trace tells: how stale each step's tokens were, and what each stop of the run cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.filesystem import Store
from storage.history import Event, History, Life, steps_of
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from storage.trace_reader import read_events


@dataclass(frozen=True, slots=True)
class StepAge:
    """The batch age of one train step that was trained at trainer version `version`."""

    step: int
    version: int
    batch_age: float
    num_tokens: int


def batch_age(events: Sequence[Event]) -> list[StepAge]:
    """The batch age of each step, by step; a step that was trained again counts as it was trained last.

    Batch age of a step trained at version V: sum of n(g,v) * (V - v) over sum of n(g,v), with n(g,v) tokens of
    group g sampled under version v, over the groups of the step.
    """
    published: dict[str, list[list[int]]] = {}
    ages: dict[int, StepAge] = {}
    for event in events:
        if event["event"] == "group_published":
            published[event["group_id"]] = event["version_tokens"]
        for step in steps_of([event]):
            spans = [span for group in step.group_ids for span in published.get(group, [])]
            tokens = sum(count for _, count in spans)
            aged = sum(count * (step.version - version) for version, count in spans)
            ages[step.step] = StepAge(step.step, step.version, aged / tokens if tokens else 0.0, tokens)
    return [ages[step] for step in sorted(ages)]


@dataclass(frozen=True, slots=True)
class StopCost:
    """What one stop and the restore after it cost. Times in seconds; `sequence` None: the run started afresh.

    `thrown_away_s` is the sum, over attempts that ran at the restored cut and did not go on, of how long they had been
    running. `lost_s` is the time between that cut and the stop; `tokens_lost` were sealed in it. `siblings_resumed` ran
    at the cut and went on from `turns_kept` finished turns, and from `tokens_continued` in the middle of
    `calls_continued`; `siblings_rerun` ran without such, or were sealed in groups whose level does not keep siblings.
    `tokens_kept` are those of groups, sealed siblings and continued calls. `step` is the restored train step, to which
    `steps_replayed` recorded batches led from the restored model; `steps_lost` had been trained beyond it.
    """

    run_process: str
    sequence: int | None
    step: int
    stopped_at: float
    down_s: float
    to_first_dispatch_s: float | None
    lost_s: float
    thrown_away_s: float
    groups_reused: int
    groups_unfinished: int
    siblings_reused: int
    siblings_resumed: int
    turns_kept: int
    calls_continued: int
    tokens_continued: int
    siblings_rerun: int
    tokens_kept: int
    tokens_lost: int
    steps_replayed: int
    steps_lost: int


def stop_cost(store: Store, layout: RunLayout) -> list[StopCost]:
    """One entry for each life of the run after its first, in order, from the trace and the manifest log.

    Durations between two processes are 0 where their clocks contradict the order of the log.
    """
    return stop_costs(History(read_events(store, layout), read_log(store, layout)))


def stop_costs(history: History) -> list[StopCost]:
    """The same from a history that was read."""
    lost_from: dict[str, float] = {}
    return [_cost(history, number, lost_from) for number in range(1, len(history.lives))]


def _cost(history: History, number: int, lost_from: dict[str, float]) -> StopCost:
    life, before = history.lives[number], history.lives[:number]
    sequence = None if life.restored is None else life.restored["sequence"]
    target = None if sequence is None else history.manifest(int(sequence))
    stopped_at = max(earlier.ended_at for earlier in before)
    cut_time = before[0].started_at if target is None else target.cut_time or target.created_at
    lost = [event for earlier in before for event in _newly_lost(earlier, cut_time, lost_from)]
    sealed = [int(e["num_tokens"]) for e in lost if e["event"] == "attempt_sealed"]
    running = {} if target is None else history.at_cut(target.sequence).running
    counts = _counts(target)
    restored = _restored_counts(life, target)
    resumed = restored["siblings_resumed"]
    went_on = _went_on(life)
    reloaded = life.restored is not None and life.restored.get("groups_buffered", 0) > 0
    buffered, tokens = (counts["buffered_groups"], counts["buffered_tokens"]) if reloaded else (0, 0)
    return StopCost(
        run_process=life.run_process,
        sequence=sequence,
        step=restored["step"],
        stopped_at=stopped_at,
        down_s=max(life.started_at - stopped_at, 0.0),
        to_first_dispatch_s=_to_first_dispatch(life),
        lost_s=max(stopped_at - cut_time, 0.0),
        thrown_away_s=sum(
            cut_time - attempt.began
            for rollout, attempt in running.items()
            if (rollout, attempt.attempt) not in went_on
        ),
        groups_reused=buffered,
        groups_unfinished=counts["ledger_groups"],
        siblings_reused=counts["reusable_siblings"],
        siblings_resumed=resumed,
        turns_kept=restored["turns_kept"],
        calls_continued=restored["calls_continued"],
        tokens_continued=restored["tokens_continued"],
        siblings_rerun=counts["running_attempts"] - resumed + counts["sealed_siblings"] - counts["reusable_siblings"],
        tokens_kept=tokens + counts["reusable_tokens"] + restored["tokens_continued"],
        tokens_lost=sum(sealed),
        steps_replayed=restored["steps_to_replay"],
        steps_lost=_steps_lost(lost, restored["step"]),
    )


def _newly_lost(life: Life, cut_time: float, lost_from: dict[str, float]) -> list[Event]:
    """Events of a life after a cut that no earlier stop has lost already; remembers where that begins."""
    until = lost_from.get(life.run_process, float("inf"))
    lost_from[life.run_process] = min(until, cut_time)
    return [event for event in life.events if cut_time < float(event["t"]) <= until]


def _counts(target: Manifest | None) -> dict[str, int]:
    names = (
        "buffered_groups",
        "buffered_tokens",
        "ledger_groups",
        "sealed_siblings",
        "reusable_siblings",
        "reusable_tokens",
        "running_attempts",
    )
    counts = {} if target is None else target.counts
    return {name: counts.get(name, 0) for name in names}


def _restored_counts(life: Life, target: Manifest | None) -> dict[str, int]:
    """What the restore itself has recorded; the manifest tells the step to readers of traces that lack it."""
    told = {} if life.restored is None else life.restored
    step = 0 if target is None else target.step
    names = ("steps_to_replay", "siblings_resumed", "turns_kept", "calls_continued", "tokens_continued")
    return {"step": int(told.get("step", step)), **{name: int(told.get(name, 0)) for name in names}}


def _went_on(life: Life) -> set[tuple[str, int]]:
    """Rollouts and attempts that a life did not begin anew: they had finished turns, or tokens that were continued."""
    resumed = [event for event in life.events if event["event"] == "attempt_resumed"]
    discarded = {_attempt_of(event) for event in life.events if event["event"] == "prefix_discarded"}
    return {_attempt_of(event) for event in resumed if int(event["turns"]) or _attempt_of(event) not in discarded}


def _attempt_of(event: Event) -> tuple[str, int]:
    return event["rollout_id"], int(event["attempt"])


def _to_first_dispatch(life: Life) -> float | None:
    starts = ("attempt_dispatched", "attempt_resumed")
    times = (float(event["t"]) for event in life.events if event["event"] in starts)
    first = next(times, None)
    return None if first is None else first - life.started_at


def _steps_lost(lost: Sequence[Event], restored_step: int) -> int:
    return len({step.step for step in steps_of(lost) if step.step > restored_step})
