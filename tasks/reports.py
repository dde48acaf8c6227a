"""Artifacts in the Prefect UI: progress, reward curve, last steps, restore report. They never fail a step."""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import httpx
from prefect import get_run_logger
from prefect.artifacts import (
    ImageArtifact,
    ProgressArtifact,
    TableArtifact,
    acreate_markdown_artifact,
    acreate_table_artifact,
)
from prefect.exceptions import PrefectException

from tasks.live_artifact import LiveArtifact
from tasks.reward_curve import data_uri, reward_curve_svg, thinned

LAST_STEPS = 20
# The artifacts of a run cost the server more than its task runs do, so that they are not refreshed at every step.
REFRESH_S = 8.0
_DEADLINE_S = 5.0

Report = Mapping[str, Any]


async def best_effort(what: str, creation: Awaitable[Any]) -> Any:
    """The artifact's id, or None: a picture that can't be stored costs no step."""
    try:
        return await asyncio.wait_for(creation, _DEADLINE_S)
    except (httpx.HTTPError, PrefectException, TimeoutError) as error:
        get_run_logger().warning("artifact %s was not stored: %s", what, error)
        return None


class TrainingReport:
    """The artifacts of one `train` flow run: brought up to date every REFRESH_S seconds at most, and by `finish`."""

    def __init__(
        self, run: str, *, max_steps: int, earlier: Sequence[tuple[int, float]], refresh_s: float | None = None
    ) -> None:
        self._run = run
        self._max_steps = max_steps
        self._refresh_s = REFRESH_S if refresh_s is None else refresh_s
        self._rewards = dict(earlier)
        self._last: list[Report] = []
        self._due_at = 0.0
        self._is_current = True
        self._progress, self._curve, self._table = LiveArtifact(), LiveArtifact(), LiveArtifact()

    async def add(self, reports: Sequence[Report]) -> None:
        """Take these steps into account; show them if the artifacts are due."""
        steps = [report for report in reports if "rewards_mean" in report]
        if not steps:
            return
        self._rewards.update((int(r["step"]), float(r["rewards_mean"])) for r in steps)
        self._last = [*self._last, *steps][-LAST_STEPS:]
        self._is_current = False
        if time.monotonic() >= self._due_at:
            await self.finish()

    async def finish(self) -> None:
        """Show everything that was added."""
        if self._is_current:
            return
        self._is_current, self._due_at = True, time.monotonic() + self._refresh_s
        percent = min(100.0, 100.0 * int(self._last[-1]["step"]) / self._max_steps)
        progress = ProgressArtifact(key="train-progress", progress=percent, description=f"Train steps of {self._run}")
        svg = reward_curve_svg(self._run, thinned(sorted(self._rewards.items())))
        curve = ImageArtifact(key="reward-curve", image_url=data_uri(svg), description=f"Mean reward of {self._run}")
        rows = [step_row(report) for report in self._last]
        table = TableArtifact(key="last-steps", table=rows, description=f"Newest steps of {self._run}")
        await best_effort("train-progress", self._progress.show(progress))
        await best_effort("reward-curve", self._curve.show(curve))
        await best_effort("last-steps", self._table.show(table))


def step_row(report: Report) -> dict[str, Any]:
    """One row of the `last-steps` table."""
    metrics = report.get("metrics", {})
    chosen = ("loss", "clip_fraction", "gradient_norm", "entropy")
    return {
        "step": report["step"],
        "reward": round(float(report["rewards_mean"]), 4),
        "batch age": round(float(report.get("batch_age", 0.0)), 3),
        "seconds": round(float(report.get("seconds", 0.0)), 3),
        **({"replayed": True} if report.get("replayed") else {}),
        **{name: round(float(metrics[name]), 5) for name in chosen if name in metrics},
    }


def restore_markdown(
    run: str, incarnation: str, selected: Report, verified: Report, links: Mapping[str, Report]
) -> str:
    """The restore report: what was chosen, what was passed over and why, and what each link did."""
    lines = [f"# Restore of `{run}`", "", f"Runtime incarnation `{incarnation}`.", ""]
    if selected["target"] is None:
        lines += ["Nothing was published yet: a fresh start from the initial model."]
    else:
        anchor = "the initial model" if selected["anchor"] is None else f"checkpoint {selected['anchor']:08d}"
        replayed = links.get("replay_buffer", {}).get("steps_to_replay", 0)
        lines += [
            f"Restored **{selected['kind']} {selected['target']:08d}** at step {selected['step']}, on {anchor}.",
            *([f"{replayed} steps are trained again from their recorded batches first."] if replayed else []),
            "",
            "| verified | |",
            "|---|---|",
            *(f"| {name.replace('_', ' ')} | {value:,} |" for name, value in verified.items()),
        ]
    if selected["passed_over"]:
        lines += ["", "## Passed over", ""]
        lines += [f"- `{sequence:08d}`: {reason}" for sequence, reason in selected["passed_over"]]
    lines += ["", "## Links", "", "| link | result |", "|---|---|"]
    lines += [f"| {link} | {_counts(result)} |" for link, result in links.items()]
    return "\n".join(lines) + "\n"


async def publish_restore_report(markdown: str, run: str) -> None:
    """Store the restore report."""
    await best_effort(
        "restore-report",
        acreate_markdown_artifact(markdown, key="restore-report", description=f"What {run} was restored from"),
    )


async def publish_verification(rows: Sequence[Report], run: str) -> None:
    """Store the table of verified bundles."""
    table = [{**row, "problem": row["problem"] or "none"} for row in rows]
    await best_effort(
        "verification",
        acreate_table_artifact(table, key="verification", description=f"Every bundle of {run}, read and compared"),
    )


def _counts(result: Report) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items()) or "done"
