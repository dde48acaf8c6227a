"""How many steps one task run drives."""

import pytest

from tasks.runtime import reached_end_of_data
from tasks.training import segment_end


@pytest.mark.parametrize(
    ("first", "step_s", "last"),
    [
        (1, None, 1),  # nothing is known yet
        (2, 1.0, 2),  # slow steps: a task run each
        (2, 30.0, 2),
        (2, 0.5, 21),  # fast ones: about ten seconds
        (91, 0.1, 100),  # never beyond the last step
        (100, 0.001, 100),
    ],
)
def test_a_task_run_is_one_slow_step_or_ten_seconds_of_fast_ones(first, step_s, last):
    assert segment_end(first, max_steps=100, step_s=step_s) == last


def test_only_the_last_report_tells_that_the_data_ended():
    assert reached_end_of_data([{"step": 1}, {"step": 1, "end_of_data": True}])
    assert not reached_end_of_data([{"step": 1}])
    assert not reached_end_of_data([])
