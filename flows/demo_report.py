"""What the demo showed, counted from the trace and the store: the report, its picture, and whether it is a success."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from flows.failures import DemoFailed
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.trace_analysis import StopCost, stop_cost
from storage.trace_reader import read_events
from tasks.accounting import audit
from tasks.run_progress import RunProgress

REPORT_FILE, PICTURE_FILE = "demo-report.json", "demo-reward.svg"
AT_THE_START, AT_THE_KILL, AT_THE_END = 5, 5, 20
REWARD_GAIN = 0.2
_SMOOTHED_OVER = 5
_STARTS = ("attempt_dispatched", "attempt_resumed")


@dataclass(frozen=True, slots=True)
class Rewards:
    """Mean reward by step: as it counts, and of the steps that the kill undid. `killed_after` is the step before it."""

    effective: Mapping[int, float]
    undone: Mapping[int, float]
    killed_after: int

    @property
    def start(self) -> float:
        """Mean of the first steps."""
        return fmean(list(self.effective.values())[:AT_THE_START])

    @property
    def at_kill(self) -> float:
        """Mean of the last steps before the kill, whether or not they were undone."""
        before = {step: r for step, r in self.effective.items() if step <= self.killed_after} | dict(self.undone)
        return fmean([before[step] for step in sorted(before)][-AT_THE_KILL:])

    @property
    def end(self) -> float:
        """Mean of the last steps."""
        return fmean(list(self.effective.values())[-AT_THE_END:])


def rewards_around(events: Sequence[Mapping[str, Any]], killed_at: float) -> Rewards:
    """Rewards before and after a kill at `killed_at` (Unix seconds)."""
    before, after = RunProgress(), RunProgress()
    before.add(event for event in events if float(event["t"]) <= killed_at)
    after.add(events)
    restored_step = int(after.last_restore["step"]) if after.last_restore is not None else 0
    return Rewards(
        effective={step: after.rewards[step] for step in sorted(after.rewards)},
        undone={step: reward for step, reward in before.rewards.items() if step > restored_step},
        killed_after=before.step,
    )


def build_report(store: Store, run: str, *, killed_at: float, seconds_total: float) -> dict[str, Any]:
    """The content of demo-report.json. Raises DemoFailed when the trace shows no stop or no restore."""
    layout = RunLayout(run)
    events = read_events(store, layout)
    stops = stop_cost(store, layout)
    if len(stops) != 1 or stops[0].sequence is None:
        raise DemoFailed(f"the trace of {run} shows {len(stops)} stops, expected one with a restored bundle")
    stop, found, rewards = stops[0], audit(store, layout), rewards_around(events, killed_at)
    attempts = [e for e in events if e["event"] == "snapshot_attempt" and e["outcome"] == "completed"]
    return {
        "run": run,
        "steps": max(rewards.effective),
        "killed_after_step": rewards.killed_after,
        "restored_step": stop.step,
        "restored_sequence": stop.sequence,
        **_reuse(stop),
        "prompts_skipped": len(found.skipped),
        "pairs_trained_twice": len(found.trained_twice),
        "pairs_trained": found.pairs_trained,
        "prompts_accounted_for": found.owners,
        "audit_problems": found.problems,
        "seconds_to_first_redispatch": _first_redispatch(events, killed_at),
        "reward_start": rewards.start,
        "reward_at_kill": rewards.at_kill,
        "reward_end": rewards.end,
        "snapshots": len(attempts),
        "cut_ms_max": max(float(e["cut_ms"]) for e in attempts),
        "seconds_total": seconds_total,
    }


def _reuse(stop: StopCost) -> dict[str, Any]:
    return {
        "groups_reused": stop.groups_reused,
        "groups_continued": stop.groups_unfinished,
        "siblings_reused": stop.siblings_reused,
        "siblings_rerun": stop.siblings_rerun,
        "siblings_resumed": stop.siblings_resumed,
        "turns_kept": stop.turns_kept,
        "calls_continued": stop.calls_continued,
        "tokens_continued": stop.tokens_continued,
        "tokens_kept": stop.tokens_kept,
        "tokens_lost": stop.tokens_lost,
        "steps_replayed": stop.steps_replayed,
        "steps_trained_again": stop.steps_lost,
        "seconds_lost": stop.lost_s,
    }


def _first_redispatch(events: Sequence[Mapping[str, Any]], killed_at: float) -> float:
    """Seconds from the kill to the first attempt that runs again."""
    times = [float(e["t"]) for e in events if e["event"] in _STARTS and float(e["t"]) > killed_at]
    if not times:
        raise DemoFailed("nothing was dispatched after the kill")
    return min(times) - killed_at


def shortcomings(report: Mapping[str, Any], *, multi_turn: bool = False) -> list[str]:
    """What the demo promises and this report does not show."""
    gain = report["reward_end"] - report["reward_start"]
    found = [f"{key} is {report[key]}, not 0" for key in ("prompts_skipped", "pairs_trained_twice") if report[key]]
    if gain < REWARD_GAIN:
        found.append(f"the reward rose by {gain:.3f}, less than {REWARD_GAIN}")
    if not report["siblings_reused"]:
        found.append("no sealed sibling was reused")
    if multi_turn and not report["turns_kept"]:
        found.append("no turn of a running episode was kept")
    return found + list(report["audit_problems"])


def write_report(report: Mapping[str, Any], rewards: Rewards, folder: Path) -> tuple[Path, Path]:
    """Write report and picture; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    report_path, picture_path = folder / REPORT_FILE, folder / PICTURE_FILE
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    draw(rewards, report).savefig(picture_path, metadata={"Date": None})
    return report_path, picture_path


def draw(rewards: Rewards, report: Mapping[str, Any]) -> Figure:
    """The reward curve with the kill marked."""
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    steps, values = list(rewards.effective), list(rewards.effective.values())
    axes.plot(steps, values, color="#93c5fd", linewidth=1, label="each step")
    smooth = [fmean(values[max(0, i + 1 - _SMOOTHED_OVER) : i + 1]) for i in range(len(values))]
    axes.plot(steps, smooth, color="#1d4ed8", linewidth=2, label=f"mean of {_SMOOTHED_OVER} steps")
    if rewards.undone:
        undone = sorted(rewards.undone.items())
        axes.plot(*zip(*undone, strict=True), "o", mfc="none", color="#6b7280", label="trained before the kill, undone")
    kill = rewards.killed_after + 0.5
    axes.axvline(kill, color="#dc2626", linestyle="--", linewidth=1.5)
    axes.annotate(
        f"SIGKILL during step {rewards.killed_after + 1}\n"
        f"{report['siblings_reused']} sealed siblings and {report['groups_reused']} groups reused",
        xy=(kill, 0.4),
        xycoords=axes.get_xaxis_transform(),
        xytext=(8, 0),
        textcoords="offset points",
        color="#dc2626",
    )
    axes.set_xlabel("train step")
    axes.set_ylabel("mean reward")
    axes.set_title(f"{report['run']}: killed in mid-rollout, restored, trained on")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure
