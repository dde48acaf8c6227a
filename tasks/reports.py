"""Artifacts in the Prefect UI: progress, reward curve, last steps, restore report. They never fail a step."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import (
    acreate_image_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.exceptions import PrefectException

from tasks.reward_curve import data_uri, reward_curve_svg

LAST_STEPS = 20
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
    """The artifacts of one `train` flow run, brought up to date after each segment."""

    def __init__(self, run: str, *, max_steps: int, earlier: Sequence[tuple[int, float]]) -> None:
        self._run = run
        self._max_steps = max_steps
        self._rewards = dict(earlier)
        self._last: list[Report] = []
        self._progress: UUID | None = None

    async def add(self, reports: Sequence[Report]) -> None:
        """Publish what these steps add."""
        steps = [report for report in reports if "rewards_mean" in report]
        if not steps:
            return
        self._rewards.update((int(r["step"]), float(r["rewards_mean"])) for r in steps)
        self._last = [*self._last, *steps][-LAST_STEPS:]
        percent = 100.0 * int(steps[-1]["step"]) / self._max_steps
        await self._show_progress(min(100.0, percent))
        svg = reward_curve_svg(self._run, sorted(self._rewards.items()))
        await best_effort(
            "reward-curve",
            acreate_image_artifact(data_uri(svg), key="reward-curve", description=f"Mean reward of {self._run}"),
        )
        await best_effort(
            "last-steps",
            acreate_table_artifact(
                [step_row(r) for r in self._last], key="last-steps", description=f"Newest steps of {self._run}"
            ),
        )

    async def _show_progress(self, percent: float) -> None:
        if self._progress is not None:
            await best_effort("train-progress", aupdate_progress_artifact(self._progress, progress=percent))
            return
        self._progress = await best_effort(
            "train-progress",
            acreate_progress_artifact(percent, key="train-progress", description=f"Train steps of {self._run}"),
        )


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


async def publish_verification(rows: Sequence[Report], where: str) -> None:
    """Store the table of verified bundles of a run or a store."""
    columns = ("run", "sequence", "kind", "step", "rows", "bytes")
    table = [
        {**{name: row.get(name) for name in columns}, "result": _result(row), "note": row.get("note", "")}
        for row in rows
    ]
    await best_effort(
        "verification",
        acreate_table_artifact(table, key="verification", description=f"Every bundle of {where}, read and compared"),
    )


def _result(row: Report) -> str:
    whole = "as published, and restored" if row.get("drilled") else "as published"
    return str(row["problem"]) or whole


async def publish_pruning(found: Sequence[Report], where: str, *, applied: bool) -> None:
    """Store the table of what retention freed, or would free."""
    table: list[dict[str, Any]] = []
    for plan in found:
        row = {"run": plan["run"]}
        if "left_alone" in plan:
            table.append({**row, "note": plan["left_alone"]})
            continue
        done, files = plan["done"], plan["files"]
        row |= {reason: sum(file["reason"] == reason for file in files) for reason in ("retired", "unreachable")}
        row |= {"bytes": plan["bytes"], "retires": ", ".join(map(str, plan["retires"])) or "none"}
        note = "; ".join(done["problems"]) if done else "may be live" * bool(plan["may_be_live"])
        table.append({**row, "deleted": len(done["deleted"]) if done else 0, "note": note})
    what = "Freed" if applied else "A dry run: what would be freed"
    await best_effort("retention", acreate_table_artifact(table, key="retention", description=f"{what} in {where}"))


def _counts(result: Report) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items()) or "done"
