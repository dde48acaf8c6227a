"""The tables of a report in the words that people read: the same for terminal, page and Prefect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.analytics.group_time import STAGES
from storage.analytics.run_report import RunReport

NEWEST_STEPS = 20
STALENESS = "Trained tokens by the train steps between the weights that sampled them and the step that trained them."
LOST_PROGRESS = (
    "How much later the siblings that ran at a stop were sealed than in a run that was never stopped, less how far the "
    "two runs were apart before it."
)
INTERRUPTIONS = (
    "At recovery level `prefix`. Tokens that were discarded are sampled anew; so are those of a call that can't be "
    "read, if it is cut off."
)
_INTERRUPTIONS = {
    "attempt_interrupted": "interrupted by a generator's failure, tokens known",
    "attempt_resumed": "continued, after a restart or an interruption",
    "prefix_discarded": "discarded by the generator that was to continue them",
    "call_unreadable": "not readable",
    "peek_failed": "generators that did not tell their calls",
}
STAGE_NAMES: Mapping[str, str] = {
    "queue_s": "queue",
    "generation_s": "generation",
    "environment_s": "environment",
    "other_s": "retries and rest",
    "finalize_s": "finalize",
    "waiting_s": "waiting to be trained",
    "training_s": "training",
}


@dataclass(frozen=True, slots=True)
class ReportTable:
    """One table: a key for machines, a title, and rows of columns with their units. `note` says how to read it."""

    key: str
    title: str
    rows: Sequence[Mapping[str, Any]]
    note: str = ""


def report_tables(report: RunReport, audit: Mapping[str, object]) -> list[ReportTable]:
    """All tables that have rows."""
    tables = [
        ReportTable("summary", "Summary", [summary(report)]),
        ReportTable("steps", f"Newest {NEWEST_STEPS} train steps", _steps(report)),
        ReportTable("stages", "Where the time of a group went", _stages(report), _stages_note(report)),
        ReportTable(
            "staleness",
            "Staleness of trained tokens",
            _staleness(report),
            STALENESS,
        ),
        ReportTable(
            "stops",
            "Stops and what they cost",
            _stops(report),
            "Attempt seconds add up over attempts that ran side by side, so that they can exceed the time that passed.",
        ),
        ReportTable(
            "lost-progress",
            "Lost progress",
            _lost(report),
            LOST_PROGRESS,
        ),
        ReportTable("interruptions", "Model calls that were cut off", _interruptions(report), INTERRUPTIONS),
        ReportTable("snapshots", "Snapshot attempts", _snapshots(report)),
        ReportTable("audit", "Exactly-once audit", [{"fact": name, "value": value} for name, value in audit.items()]),
    ]
    return [table for table in tables if table.rows]


def summary(report: RunReport) -> dict[str, Any]:
    """The run in a few figures."""
    steps, stops = report.steps, report.stops
    tokens, aged = int(steps["num_tokens"].sum()), float((steps["batch_age"] * steps["num_tokens"]).sum())
    done = report.snapshots.filter(outcome="completed")
    return {
        "train steps": steps.height,
        "trained tokens": tokens,
        "mean batch age": _rounded(aged / tokens if tokens else None),
        "stops": stops.height,
        "thrown away, attempt s": _rounded(stops["thrown_away_s"].sum()),
        "redone, attempt s": _rounded(stops["redone_s"].sum()),
        "environments parked, s": _rounded(report.parked["parked_s"].sum()),
        "snapshots": done.height,
        "batch age differs from the controller's by at most": report.worst_age_error,
    }


def _steps(report: RunReport) -> list[dict[str, Any]]:
    names = {
        "step": "step",
        "trained_at": "at version",
        "rewards_mean": "reward",
        "batch_age": "batch age",
        "num_tokens": "tokens",
        "seconds": "seconds",
        "waited_s": "of them waiting, s",
        "replayed": "replayed",
    }
    return _renamed(report.steps.tail(NEWEST_STEPS).to_dicts(), names)


def _stages(report: RunReport) -> list[dict[str, Any]]:
    rows = report.stages.to_dicts()
    if not rows or not rows[0]["groups"]:
        return []
    total = sum(rows[0][stage] or 0.0 for stage in STAGES)
    return [
        {
            "stage": STAGE_NAMES[stage],
            "mean seconds": _rounded(rows[0][stage]),
            "share %": round(100 * (rows[0][stage] or 0.0) / total, 1) if total else 0.0,
        }
        for stage in STAGES
    ]


def _stages_note(report: RunReport) -> str:
    rows = report.stages.to_dicts()
    if not rows:
        return ""
    groups, crossed = rows[0]["groups"], rows[0]["crossed"]
    note = f"Means over {groups:,} trained groups, each timed by its slowest sibling."
    return f"{note} {crossed:,} groups that crossed a stop are left out." if crossed else note


def _staleness(report: RunReport) -> list[dict[str, Any]]:
    return [
        {"steps behind": row["staleness"], "tokens": row["num_tokens"], "share %": round(100 * row["share"], 2)}
        for row in report.staleness.to_dicts()
    ]


def _stops(report: RunReport) -> list[dict[str, Any]]:
    names = {
        "stop": "stop",
        "step": "restored to step",
        "sequence": "bundle",
        "down_s": "down, s",
        "lost_s": "since the cut, s",
        "running": "attempts thrown away",
        "thrown_away_s": "thrown away, attempt s",
        "redone": "siblings redone",
        "redone_s": "redone, attempt s",
        "retrained": "steps trained again",
        "retrained_s": "trained again, s",
    }
    return _renamed(report.stops.to_dicts(), names)


def _lost(report: RunReport) -> list[dict[str, Any]]:
    names = {
        "stop": "stop",
        "against": "against",
        "running": "siblings at the stop",
        "siblings": "found in both",
        "late_s": "sealed later by, s",
        "drift_s": "apart before, s",
        "lost_s": "lost progress, s",
    }
    return _renamed(report.lost_progress.to_dicts(), names)


def _interruptions(report: RunReport) -> list[dict[str, Any]]:
    return [
        {
            "what": _INTERRUPTIONS[row["kind"]],
            "times": row["times"],
            "tokens": _rounded(row["tokens"]),
            "newest reason": _rounded(row["reason"]),
        }
        for row in report.interruptions.to_dicts()
    ]


def _snapshots(report: RunReport) -> list[dict[str, Any]]:
    names = {
        "outcome": "outcome",
        "reason": "reason",
        "attempts": "attempts",
        "cut_ms_median": "cut, median ms",
        "cut_ms_most": "cut, most ms",
        "barrier_wait_ms_median": "barrier wait, median ms",
        **({"peek_ms_median": "look at calls, median ms"} if report.snapshots["peek_ms"].count() else {}),
        "write_s_median": "write, median s",
        "write_s_most": "write, most s",
    }
    return _renamed(report.snapshot_summary.to_dicts(), names)


def _renamed(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{shown: _rounded(row[name]) for name, shown in names.items()} for row in rows]


def _rounded(value: Any) -> Any:
    """Numbers as people read them; nothing where nothing is known."""
    if value is None:
        return ""
    if isinstance(value, float):
        return round(value, 3)
    return value
