"""The report of a run: a page that needs nothing else, plots that say what they show, and the figures of the trace."""

import base64
from collections.abc import Callable, Sequence
from html.parser import HTMLParser

import pytest

from storage.analytics.group_time import STAGES
from storage.analytics.run_report import RunReport, report_of
from storage.filesystem import open_store
from storage.trace_reader import open_trace
from tasks.report_figures import panels
from tasks.report_page import report_page
from tasks.report_pictures import report_pictures
from tasks.report_style import STOP_COSTS, bucketed
from tasks.report_tables import report_tables
from tasks.reports import report_markdown
from tests.storage.simulated_trace import SimulatedRun

Report = Callable[..., RunReport]


@pytest.fixture(scope="module")
def report() -> Report:
    """Reports of simulated runs, made once each."""
    store, known = open_store("memory://reports"), dict[tuple[str, ...], RunReport]()
    runs = {
        "stopped": SimulatedRun("stopped", 7, stops=3, events_per_life=400),
        "whole": SimulatedRun("whole", 3, stops=0, events_per_life=1600),
    }
    for run in runs.values():
        run.write(store)

    def make(run: str, *against: str) -> RunReport:
        chosen = (run, *against)
        if chosen not in known:
            with open_trace(store, [runs[name].layout for name in chosen]) as trace:
                known[chosen] = report_of(trace, {name: runs[name].log for name in chosen}, run, against)
        return known[chosen]

    return make


class Resources(HTMLParser):
    """Everything that a page would load from elsewhere, and how often it has which element."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[str, str]] = []
        self.elements: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take an element into account."""
        self.elements.append(tag)
        self.loaded += [(tag, value) for name, value in attrs if name in ("src", "href", "data", "srcset") and value]


def _page(report: RunReport, problems: Sequence[str] = ()) -> str:
    return report_page(report.run, "memory://<store>", panels(report), report_tables(report, {"skipped": 0}), problems)


def test_the_page_loads_nothing_from_anywhere(report: Report) -> None:
    page, found = _page(report("stopped", "whole")), Resources()
    found.feed(page)
    assert found.loaded == []
    assert "link" not in found.elements
    assert "@import" not in page.partition("</style>")[0]
    assert page.count("* plotly.js v") == 1
    assert page.count("Plotly.newPlot(") >= 6


def test_names_and_problems_are_text_and_never_markup(report: Report) -> None:
    page = _page(report("whole"), ["<b>lost</b>"])
    assert "memory://&lt;store&gt;" in page
    assert "&lt;b&gt;lost&lt;/b&gt;" in page


def test_every_plot_says_what_it_shows_and_in_which_unit(report: Report) -> None:
    shown = list(panels(report("stopped", "whole")))
    assert [p.key for p in shown] == [
        "steps",
        "staleness",
        "stages",
        "snapshots",
        "throughput",
        "stops",
        "lost-progress",
    ]
    for panel in shown:
        layout = panel.figure.to_dict()["layout"]
        assert all(layout[axis].get("title", {}).get("text") for axis in layout if axis.startswith("yaxis"))
        assert panel.title
        assert panel.caption.endswith(".")
        assert all(trace.name for trace in panel.figure.data)


def test_the_plots_hold_the_figures_of_the_tables(report: Report) -> None:
    found = report("stopped", "whole")
    figures = {panel.key: panel.figure for panel in panels(found)}
    assert list(figures["steps"].data[1].y) == found.steps["batch_age"].to_list()
    assert sum(figures["staleness"].data[0].y) == pytest.approx(100.0)
    stacked = [sum(values) for values in zip(*(trace.y for trace in figures["stages"].data), strict=True)]
    assert stacked == pytest.approx(found.stages_by_step.select(STAGES).sum_horizontal().to_list())
    costs = {trace.name: list(trace.y) for trace in figures["stops"].data}
    assert costs == {shown: found.stops[name].to_list() for name, (shown, _) in STOP_COSTS.items()}


def test_a_run_that_never_stopped_has_no_plots_of_stops(report: Report) -> None:
    assert [panel.key for panel in panels(report("whole"))] == ["steps", "staleness", "stages", "snapshots"]
    assert set(report_pictures(report("whole"))) == {"group-time", "staleness"}
    assert {table.key for table in report_tables(report("whole"), {})} == {
        *("summary", "steps", "stages", "staleness", "interruptions", "snapshots"),
    }


def test_what_became_of_calls_that_were_cut_off_is_told_in_words(report: Report) -> None:
    found = report("stopped")
    (table,) = [table for table in report_tables(found, {}) if table.key == "interruptions"]
    told = {row["what"]: (row["times"], row["tokens"], row["newest reason"]) for row in table.rows}
    assert len(told) == found.interruptions.height == 3
    times, tokens = found.interruptions.filter(kind="prefix_discarded").select("times", "tokens").row(0)
    assert told["discarded by the generator that was to continue them"] == (times, tokens, "sampling")
    assert told["continued, after a restart or an interruption"][2] == ""


def test_the_pictures_are_png_in_the_address_itself(report: Report) -> None:
    pictures = report_pictures(report("stopped"))
    assert set(pictures) == {"group-time", "staleness", "throughput", "stops"}
    for description, address in pictures.values():
        assert description.endswith("of stopped")
        kind, _, data = address.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")


def test_the_text_of_the_report_has_every_table_and_the_problems_first(report: Report) -> None:
    tables = report_tables(report("stopped", "whole"), {"trained twice": 0})
    text = report_markdown("stopped", tables, ["2 prompts skipped"])
    assert text.index("2 prompts skipped") < text.index("## ")
    assert all(f"## {table.title}" in text for table in tables)
    assert "| trained twice | 0 |" in text


def test_the_summary_adds_up_what_the_tables_hold(report: Report) -> None:
    found = report("stopped")
    (summary,) = report_tables(found, {})[0].rows
    assert summary["train steps"] == found.steps.height
    assert summary["thrown away, attempt s"] == pytest.approx(found.stops["thrown_away_s"].sum(), abs=1e-3)
    assert summary["batch age differs from the controller's by at most"] == 0.0
    tokens, ages = found.steps["num_tokens"], found.steps["batch_age"]
    assert summary["mean batch age"] == pytest.approx((tokens * ages).sum() / tokens.sum(), abs=1e-3)


def test_long_runs_are_drawn_with_few_points_whose_mean_is_theirs(report: Report) -> None:
    steps = report("whole").steps.select("step", "batch_age")
    few = bucketed(steps, 7)
    assert few.height <= 7
    assert few["step"].to_list()[-1] == steps["step"].to_list()[-1]
    assert few["batch_age"].to_list()[0] == pytest.approx(steps["batch_age"].head(-(-steps.height // 7)).mean())
    assert bucketed(steps, steps.height).equals(steps)
