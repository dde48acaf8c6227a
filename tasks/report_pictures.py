"""The pictures of a report for Prefect's pages: PNG as data URIs, which need no network and no scripts."""

import base64
import io
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from storage.analytics.group_time import STAGES
from storage.analytics.run_report import RunReport
from tasks.report_style import COLOURS, MOST_BARS, STAGE_COLOURS, STOP_COSTS, bucketed
from tasks.report_tables import STAGE_NAMES

_MOST_STOPS = 4
_SIZE_INCHES, _DPI = (8.0, 3.6), 100


def report_pictures(report: RunReport) -> dict[str, tuple[str, str]]:
    """By key: what the picture shows, and its data URI. Only those for which there are figures."""
    drawn: Sequence[tuple[str, str, bool, Callable[[Axes, RunReport], None]]] = (
        ("group-time", "Where the time of the groups went", report.stages_by_step.height > 0, _group_time),
        ("staleness", "Staleness of trained tokens", report.staleness.height > 0, _staleness),
        ("throughput", "Tokens per second around stops", report.throughput.height > 0, _throughput),
        ("stops", "What each stop cost", report.stops.height > 0, _stops),
    )
    return {key: (f"{what} of {report.run}", _png(draw, report)) for key, what, is_there, draw in drawn if is_there}


def _png(draw: Callable[[Axes, RunReport], None], report: RunReport) -> str:
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    draw(axes, report)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb")
    axes.set_axisbelow(True)
    data = io.BytesIO()
    FigureCanvasAgg(figure).print_png(data)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _group_time(axes: Axes, report: RunReport) -> None:
    stages = bucketed(report.stages_by_step.select("step", *STAGES), MOST_BARS)
    steps, floor = stages["step"].to_list(), [0.0] * stages.height
    width = 0.85 * max(1, steps[1] - steps[0]) if len(steps) > 1 else 0.85
    for stage in STAGES:
        seconds = stages[stage].fill_null(0.0).to_list()
        axes.bar(steps, seconds, width, floor, label=STAGE_NAMES[stage], color=STAGE_COLOURS[stage])
        floor = [below + own for below, own in zip(floor, seconds, strict=True)]
    axes.set(title="Where the time of a group went", xlabel="train step", ylabel="seconds per group, mean")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


def _staleness(axes: Axes, report: RunReport) -> None:
    shares = [100 * share for share in report.staleness["share"]]
    bars = axes.bar(report.staleness["staleness"].to_list(), shares, color=COLOURS[0])
    axes.bar_label(bars, fmt="%.1f %%", fontsize=8)
    axes.set_xticks(report.staleness["staleness"].to_list()[:30])
    axes.set(title="Staleness of trained tokens", xlabel="staleness, train steps", ylabel="share of tokens, %")


def _throughput(axes: Axes, report: RunReport) -> None:
    newest = report.stops["stop"].to_list()[-_MOST_STOPS:]
    down = dict(report.stops.select("stop", "down_s").iter_rows())
    for colour, stop in zip(COLOURS, newest, strict=False):
        own = report.throughput.filter(stop=stop)
        points = own["after_s"].to_list(), own["tokens_per_s"].to_list()
        axes.step(*points, where="mid", label=f"stop {stop}, down {down[stop]:,.0f} s", color=colour)
    axes.axvline(0.0, color="#4b5563", linestyle=":")
    axes.set(
        title="Throughput around stops",
        xlabel="seconds before the stop and after the next start",
        ylabel="sealed tokens per second",
    )
    axes.legend(fontsize=8, frameon=False)


def _stops(axes: Axes, report: RunReport) -> None:
    stops, width = report.stops.tail(20), 0.8 / len(STOP_COSTS)
    for number, (name, (shown, colour)) in enumerate(STOP_COSTS.items()):
        places = [place + (number - len(STOP_COSTS) / 2 + 0.5) * width for place in range(stops.height)]
        axes.bar(places, stops[name].to_list(), width, label=shown, color=colour)
    axes.set_xticks(range(stops.height), [f"stop {stop}" for stop in stops["stop"]])
    axes.set(title="What each stop cost", ylabel="seconds")
    axes.legend(fontsize=8, frameon=False)
