"""What people see: the restore report, the reward curve, the table of steps."""

import base64
from xml.etree import ElementTree

import pytest

from tasks.reports import restore_markdown, step_row
from tasks.reward_curve import data_uri, reward_curve_svg, thinned

SELECTED = {
    "target": 7,
    "anchor": 5,
    "kind": "rollout_snapshot",
    "step": 12,
    "counts": {"ledger_groups": 4, "siblings": 16, "reusable_siblings": 5, "buffered_groups": 2},
    "passed_over": [[8, "rows.parquet: sha256 differs"]],
}


def test_the_restore_report_names_bundle_anchor_and_what_was_passed_over():
    text = restore_markdown("run", "inc", SELECTED, {"rows": 1234}, {"ledger": {"groups": 3}})
    assert "rollout_snapshot 00000007" in text
    assert "checkpoint 00000005" in text
    assert "`00000008`: rows.parquet: sha256 differs" in text
    assert "| ledger | groups: 3 |" in text
    assert "1,234" in text


def test_the_restore_report_sets_what_was_planned_beside_what_was_restored():
    links = {
        "replay_buffer": {"groups": 2},
        "ledger": {
            **{"groups_unfinished": 4, "siblings_reused": 5, "siblings_rerun": 8, "siblings_resumed": 3},
            **{"tokens_kept": 90, "calls_continued": 3, "tokens_continued": 700},
        },
    }
    selected = {**SELECTED, "counts": {**SELECTED["counts"], "partial_calls": 3, "partial_tokens": 700}}
    text = restore_markdown("run", "inc", selected, {}, links)
    assert "| unfinished groups, continued | 4 | 4 |" in text
    assert "| siblings, run again or resumed | 11 | 11 |" in text
    assert "| model calls, continued | 3 | 3 |" in text
    assert "| tokens of these calls, kept | 700 | 700 |" in text
    assert "| tokens of sealed siblings, kept | 0 | 90 |" in text


def test_a_fresh_start_is_reported_as_one():
    nothing = {"target": None, "anchor": None, "kind": None, "step": 0, "passed_over": []}
    assert "fresh start" in restore_markdown("run", "inc", nothing, {}, {})


def test_the_reward_curve_is_an_image_that_needs_no_server():
    uri = data_uri(reward_curve_svg("a<b", [(1, 0.25), (2, 0.5), (3, 0.75)]))
    svg = ElementTree.fromstring(base64.b64decode(uri.removeprefix("data:image/svg+xml;base64,")))
    line = svg.find("{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    assert len(line.attrib["points"].split()) == 3


def test_values_outside_of_the_usual_range_are_within_the_picture():
    svg = ElementTree.fromstring(reward_curve_svg("run", [(1, -3.2), (2, 17.0)], [(1, 0.0), (2, 1.71)]))
    for line in svg.iter("{http://www.w3.org/2000/svg}polyline"):
        heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
        assert all(0 <= height <= float(svg.attrib["height"]) for height in heights)
    labels = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"20.00", "-4.00", "2.00", "0.50"} <= set(labels)


def test_a_curve_without_steps_can_be_drawn():
    ElementTree.fromstring(reward_curve_svg("run", []))


def test_a_long_curve_is_drawn_with_a_bounded_number_of_points_that_keep_its_mean_and_its_end():
    rewards = [(step, step / 1000) for step in range(1, 1001)]
    points = thinned(rewards, most=100)
    assert len(points) == 100
    assert points[-1][0] == 1000
    assert sum(reward for _, reward in points) / 100 == pytest.approx(sum(r for _, r in rewards) / 1000)


@pytest.mark.parametrize("steps", [0, 1, 300])
def test_a_short_curve_is_drawn_as_it_is(steps):
    rewards = [(step, 0.5) for step in range(1, steps + 1)]
    assert thinned(rewards) == rewards


def test_a_step_row_shows_only_the_metrics_there_are():
    row = step_row({"step": 3, "rewards_mean": 0.5, "batch_age": 1.0, "seconds": 0.2, "metrics": {"loss": 0.1}})
    assert row == {"step": 3, "reward": 0.5, "batch age": 1.0, "seconds": 0.2, "loss": 0.1}
