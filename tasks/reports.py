"""Artifacts in the Prefect UI: progress, reward curve, last steps, restore report. They never fail a step."""

import asyncio
import re
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
from tasks.report_tables import ReportTable
from tasks.reward_curve import by_step, data_uri, reward_curve_svg
from tasks.run_progress import RunProgress

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


def artifact_key(name: str, run: str) -> str:
    """The key of a run's artifact: Prefect allows small letters, digits and dashes. Runs don't share a history."""
    return f"{name}-{re.sub(r'[^a-z0-9]+', '-', run)}".rstrip("-")


class TrainingReport:
    """The artifacts of one `train` flow run: brought up to date every REFRESH_S seconds at most, and by `finish`.

    Each is stored once and then replaced, so that a run of any length leaves as many rows in Prefect's database as a
    short one.
    """

    def __init__(
        self, run: str, *, max_steps: int, earlier: RunProgress | None = None, refresh_s: float | None = None
    ) -> None:
        self._run = run
        self._max_steps = max_steps
        self._refresh_s = REFRESH_S if refresh_s is None else refresh_s
        self._rewards = dict(earlier.rewards) if earlier is not None else {}
        self._ages = dict(earlier.batch_ages) if earlier is not None else {}
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
        self._ages.update((int(r["step"]), float(r["batch_age"])) for r in steps if "batch_age" in r)
        self._last = [*self._last, *steps][-LAST_STEPS:]
        self._is_current = False
        if time.monotonic() >= self._due_at:
            await self.finish()

    async def finish(self) -> None:
        """Show everything that was added."""
        if self._is_current:
            return
        self._is_current, self._due_at = True, time.monotonic() + self._refresh_s
        run = self._run
        percent = min(100.0, 100.0 * int(self._last[-1]["step"]) / self._max_steps)
        progress = ProgressArtifact(
            key=artifact_key("train-progress", run), progress=percent, description=f"Train steps of {run}"
        )
        svg = reward_curve_svg(run, by_step(self._rewards), by_step(self._ages))
        curve = ImageArtifact(
            key=artifact_key("reward-curve", run),
            image_url=data_uri(svg),
            description=f"Mean reward and batch age of {run}",
        )
        rows = [step_row(report) for report in self._last]
        table = TableArtifact(key=artifact_key("last-steps", run), table=rows, description=f"Newest steps of {run}")
        await asyncio.gather(  # a server that is away costs one deadline, not three
            best_effort("train-progress", self._progress.show(progress)),
            best_effort("reward-curve", self._curve.show(curve)),
            best_effort("last-steps", self._table.show(table)),
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
            "",
            "## Plan and what came of it",
            "",
            "| | planned | restored |",
            "|---|---|---|",
            *(
                f"| {what} | {planned:,} | {actual:,} |"
                for what, planned, actual in plan_against_actual(selected, links)
            ),
        ]
    if selected["passed_over"]:
        lines += ["", "## Passed over", ""]
        lines += [f"- `{sequence:08d}`: {reason}" for sequence, reason in selected["passed_over"]]
    lines += ["", "## Links", "", "| link | result |", "|---|---|"]
    lines += [f"| {link} | {_counts(result)} |" for link, result in links.items()]
    return "\n".join(lines) + "\n"


def plan_against_actual(selected: Report, links: Mapping[str, Report]) -> list[tuple[str, int, int]]:
    """What the chosen bundle's manifest promises to give back, and what the links say they restored."""
    counts, buffer, ledger = selected["counts"], links.get("replay_buffer", {}), links.get("ledger", {})
    reusable = counts.get("reusable_siblings", 0)
    again = ledger.get("siblings_rerun", 0) + ledger.get("siblings_resumed", 0)
    return [
        ("finished groups, reused", counts.get("buffered_groups", 0), buffer.get("groups", 0)),
        ("unfinished groups, continued", counts.get("ledger_groups", 0), ledger.get("groups_unfinished", 0)),
        ("sealed siblings, reused", reusable, ledger.get("siblings_reused", 0)),
        ("siblings, run again or resumed", counts.get("siblings", 0) - reusable, again),
        ("model calls, continued", counts.get("partial_calls", 0), ledger.get("calls_continued", 0)),
        ("tokens of these calls, kept", counts.get("partial_tokens", 0), ledger.get("tokens_continued", 0)),
        ("tokens of sealed siblings, kept", counts.get("reusable_tokens", 0), ledger.get("tokens_kept", 0)),
        ("spare prompts", counts.get("spare_prompts", 0), links.get("spare_prompts", {}).get("spares", 0)),
    ]


async def publish_restore_report(markdown: str, run: str) -> None:
    """Store the restore report."""
    await best_effort(
        "restore-report",
        acreate_markdown_artifact(
            markdown, key=artifact_key("restore-report", run), description=f"What {run} was restored from"
        ),
    )


async def publish_run_report(
    run: str,
    progress: RunProgress,
    tables: Sequence[ReportTable],
    pictures: Mapping[str, tuple[str, str]],
    problems: Sequence[str],
) -> None:
    """Store a run's curves, the pictures and tables of its report, and all of it in one text."""
    svg = reward_curve_svg(run, by_step(progress.rewards), by_step(progress.batch_ages))
    shown = {"curves": (f"Reward and batch age of {run}", data_uri(svg)), **pictures}
    for key, (description, uri) in shown.items():
        picture = ImageArtifact(key=artifact_key(f"report-{key}", run), image_url=uri, description=description)
        await best_effort(f"report-{key}", picture.acreate())
    for table in tables:
        stored = acreate_table_artifact(
            [dict(row) for row in table.rows],
            key=artifact_key(f"report-{table.key}", run),
            description=f"{table.title}: {run}. {table.note}".rstrip(),
        )
        await best_effort(f"report-{table.key}", stored)
    text = acreate_markdown_artifact(
        report_markdown(run, tables, problems),
        key=artifact_key("report", run),
        description=f"What the trace of {run} tells",
    )
    await best_effort("report", text)


def report_markdown(run: str, tables: Sequence[ReportTable], problems: Sequence[str]) -> str:
    """The report as one text, the audit's problems first."""
    lines = [f"# Report of `{run}`", "", *(f"**{problem}**" for problem in problems)]
    for table in tables:
        lines += ["", f"## {table.title}", "", *([table.note, ""] if table.note else [])]
        if table.key == "summary":
            lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table.rows[0].items())]
            continue
        columns = list(table.rows[0])
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(str(row[name]) for name in columns)} |" for row in table.rows]
    return "\n".join(lines) + "\n"


async def publish_verification(rows: Sequence[Report], run: str | None, store_url: str) -> None:
    """Store the table of verified bundles of a run or (`run` is None) a store."""
    columns = ("run", "sequence", "kind", "step", "rows", "bytes")
    table = [
        {**{name: row.get(name) for name in columns}, "result": _result(row), "note": row.get("note", "")}
        for row in rows
    ]
    await best_effort(
        "verification",
        acreate_table_artifact(
            table,
            key=artifact_key("verification", run or ""),
            description=f"Every bundle of {run or store_url}, read and compared",
        ),
    )


def _result(row: Report) -> str:
    whole = "as published, and restored" if row.get("drilled") else "as published"
    return str(row["problem"]) or whole


async def publish_pruning(found: Sequence[Report], run: str | None, store_url: str, *, applied: bool) -> None:
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
    await best_effort(
        "retention",
        acreate_table_artifact(
            table, key=artifact_key("retention", run or ""), description=f"{what} in {run or store_url}"
        ),
    )


def _counts(result: Report) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items()) or "done"
