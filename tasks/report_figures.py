"""The interactive plots of a report, each with its units on its axes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from storage.analytics.group_time import STAGES
from storage.analytics.run_report import RunReport
from tasks.report_style import COLOURS, MOST_BARS, STAGE_COLOURS, STOP_COSTS, bucketed
from tasks.report_tables import LOST_PROGRESS, STAGE_NAMES, STALENESS

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = COLOURS
_OUTCOMES = {"completed": GREEN, "skipped": ORANGE, "failed": RED}
MOST_POINTS = 600
_MOST_STOPS = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot with a heading and a sentence on how to read it."""

    key: str
    title: str
    caption: str
    figure: go.Figure


def panels(report: RunReport) -> Iterator[Panel]:
    """Every plot for which the report has figures, in the order of the page."""
    if report.steps.height:
        yield Panel(
            "steps",
            "Reward and batch age",
            "Mean reward of each train step, and how many train steps old the weights were that sampled its tokens. "
            "Dotted lines: the run was restored to this step.",
            _steps(report),
        )
        yield Panel(
            "staleness",
            "Staleness",
            STALENESS,
            _staleness(report),
        )
    if report.stages_by_step.height:
        yield Panel(
            "stages",
            "Where the time of a group went",
            "Mean seconds of the groups of each train step, from the reservation of the prompt to the optimizer step; "
            "generation and environment are those of the slowest sibling.",
            _stages(report),
        )
    if report.snapshots.height:
        yield Panel(
            "snapshots",
            "Snapshots over time",
            "Each attempt: how long the rollout state stood still, and how long writing took afterwards. Attempts that "
            "were skipped or failed are marked below.",
            _snapshots(report),
        )
    if report.stops.height:
        yield Panel(
            "throughput",
            "Throughput around each stop",
            "Tokens of sealed siblings per second, two minutes before each stop and two minutes from the next start "
            "on. The time between them is left out.",
            _throughput(report),
        )
        yield Panel(
            "stops",
            "What each stop cost",
            "Attempt seconds that were thrown away or spent again, the seconds in which nothing ran, and those of "
            "train steps that were trained again.",
            _stops(report),
        )
    if report.lost_progress["lost_s"].drop_nulls().len():
        yield Panel(
            "lost-progress",
            "Lost progress",
            LOST_PROGRESS,
            _lost(report),
        )


def styled(figure: go.Figure, *, height: int = 380) -> go.Figure:
    """The look that all plots of a report share; `height` in pixels."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 70, "r": 24, "t": 72, "b": 56},
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#1f2937"},
        legend={"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        hovermode="x unified",
    )
    return figure


def _steps(report: RunReport) -> go.Figure:
    steps = bucketed(report.steps.select("step", "rewards_mean", "batch_age"), MOST_POINTS)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    mode = "lines+markers" if steps.height < 60 else "lines"
    for row, name, shown, colour in ((1, "rewards_mean", "reward", BLUE), (2, "batch_age", "batch age", ORANGE)):
        line = {"x": steps["step"].to_list(), "y": steps[name].to_list(), "name": shown, "line": {"color": colour}}
        figure.add_trace(go.Scatter(**line, mode=mode), row=row, col=1)
    for stop in report.stops.tail(_MOST_STOPS).iter_rows(named=True):
        figure.add_vline(x=stop["step"] + 0.5, line={"color": "#4b5563", "dash": "dot", "width": 1})
    figure.update_xaxes(title="train step", row=2, col=1)
    figure.update_yaxes(title="mean reward", row=1, col=1)
    figure.update_yaxes(title="batch age, steps", rangemode="tozero", row=2, col=1)
    return styled(figure, height=520)


def _staleness(report: RunReport) -> go.Figure:
    shares = (report.staleness["share"] * 100).to_list()
    texts = [f"{share:.1f} %" for share in shares]
    bar = go.Bar(x=report.staleness["staleness"].to_list(), y=shares, marker_color=BLUE, text=texts, name="tokens")
    figure = go.Figure(bar)
    figure.update_xaxes(title="staleness, train steps", dtick=1)
    figure.update_yaxes(title="share of trained tokens, %", range=[0, max(shares, default=0.0) * 1.15 or 1.0])
    return styled(figure, height=340)


def _stages(report: RunReport) -> go.Figure:
    stages = bucketed(report.stages_by_step.select("step", *STAGES), MOST_BARS)
    figure = go.Figure()
    for stage in STAGES:
        named = {"name": STAGE_NAMES[stage], "marker_color": STAGE_COLOURS[stage]}
        seconds = stages[stage].to_list()
        figure.add_trace(go.Bar(x=stages["step"].to_list(), y=seconds, **named, hovertemplate="%{y:.3f} s"))
    figure.update_layout(barmode="stack", bargap=0.1)
    figure.update_xaxes(title="train step")
    figure.update_yaxes(title="seconds per group, mean")
    return styled(figure, height=440)


def _snapshots(report: RunReport) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    shown = report.snapshots.with_columns(pl.col("after_s") / 60).tail(MOST_POINTS * 5)
    for outcome, colour in _OUTCOMES.items():
        own = shown.filter(outcome=outcome)
        for row, name in ((1, "cut_ms"), (2, "write_s")):
            marker = {"color": colour, "symbol": "circle" if outcome == "completed" else "x", "size": 7}
            points: dict[str, Any] = {"x": own["after_s"].to_list(), "y": own[name].fill_null(0.0).to_list()}
            texts = [f"attempt {n}: {reason or outcome}" for n, reason in own.select("number", "reason").iter_rows()]
            trace = go.Scatter(
                **points, mode="markers", cliponaxis=False, name=outcome, legendgroup=outcome, marker=marker, text=texts
            )
            if own.height:
                figure.add_trace(trace.update(showlegend=row == 1), row=row, col=1)
    figure.update_xaxes(title="minutes since the run began", row=2, col=1)
    figure.update_yaxes(title="cut, ms", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="write, s", rangemode="tozero", row=2, col=1)
    return styled(figure, height=460).update_layout(hovermode="closest")


def _throughput(report: RunReport) -> go.Figure:
    figure = go.Figure()
    colours = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY, "#000000")
    newest = report.stops["stop"].to_list()[-_MOST_STOPS:]
    down = dict(report.stops.select("stop", "down_s").iter_rows())
    for colour, stop in zip(colours, newest, strict=False):
        own = report.throughput.filter(stop=stop)
        line = {"color": colour, "shape": "hvh"}
        points = {"x": own["after_s"].to_list(), "y": own["tokens_per_s"].to_list()}
        figure.add_trace(go.Scatter(**points, name=f"stop {stop}, down {down[stop]:,.0f} s", mode="lines", line=line))
    figure.add_vline(x=0, line={"color": "#4b5563", "dash": "dot"}, annotation_text="stop, next start")
    figure.update_xaxes(title="seconds before the stop (negative) and after the next start")
    figure.update_yaxes(title="sealed tokens per second", rangemode="tozero")
    return styled(figure).update_layout(showlegend=True)


def _stops(report: RunReport) -> go.Figure:
    figure = go.Figure()
    stops = [f"stop {stop}" for stop in report.stops["stop"]]
    for name, (shown, colour) in STOP_COSTS.items():
        values = report.stops[name].to_list()
        figure.add_trace(go.Bar(x=stops, y=values, name=shown, marker_color=colour, hovertemplate="%{y:.2f} s"))
    figure.update_layout(barmode="group")
    figure.update_yaxes(title="seconds")
    return styled(figure)


def _lost(report: RunReport) -> go.Figure:
    figure = go.Figure()
    for colour, run in zip((BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY), report.against, strict=False):
        own = report.lost_progress.filter(against=run)
        stops = [f"stop {stop}" for stop in own["stop"]]
        figure.add_trace(go.Bar(x=stops, y=own["lost_s"].to_list(), name=f"against {run}", marker_color=colour))
    figure.update_layout(barmode="group")
    figure.update_yaxes(title="lost progress, s")
    return styled(figure, height=340).update_layout(showlegend=True)
