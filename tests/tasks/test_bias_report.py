"""What restarts did to the trained work, as a table and as a plot."""

from storage.restart_bias import Comparison, Sample
from tasks.bias_panel import bias_panels
from tasks.bias_table import bias_tables

SOME = Sample(12, 30.0, 28.0, 32.0, 29.0, 41.0)
ONE = Sample(1, 55.0, None, None, 55.0, 55.0)
FOUND = [
    Comparison("sibling", "tokens", SOME, Sample(40, 25.0, 24.0, 26.0, 24.0, 33.0), 5.0, 2.7, 7.3),
    Comparison("sibling", "reward", SOME, SOME, 0.0, -2.8, 2.8),
    Comparison("turn", "tokens", ONE, SOME, 25.0, None, None),
]
NONE_STOPPED = [Comparison("turn", "tokens", None, SOME, None, None, None)]


def test_the_table_has_means_with_intervals_and_says_where_they_differ() -> None:
    (table,) = bias_tables(FOUND)
    first, second, third = table.rows
    assert (first["restarted groups"], first["their mean"], first["mean"]) == (12, "30 [28, 32]", "25 [24, 26]")
    assert (first["difference"], first["differs"]) == ("5 [2.7, 7.3]", "yes")
    assert second["differs"] == "no"
    assert (third["their mean"], third["difference"], third["differs"]) == ("55", "25", "no")


def test_the_plot_has_both_kinds_at_each_level_with_their_intervals() -> None:
    (panel,) = bias_panels(FOUND)
    tokens = {trace.name: trace for trace in panel.figure.data if trace.xaxis == "x"}
    lived = tokens["lived through a restart"]
    assert (list(lived.x), list(lived.y), list(lived.error_y.array)) == (["sibling", "turn"], [30.0, 55.0], [2.0, 0.0])
    assert list(tokens["did not"].y) == [25.0, 30.0]
    assert panel.figure.layout.yaxis.title.text == "tokens per rollout"


def test_a_run_in_which_nothing_lived_through_a_restart_has_neither() -> None:
    assert bias_tables(NONE_STOPPED) == []
    assert bias_panels(NONE_STOPPED) == []
