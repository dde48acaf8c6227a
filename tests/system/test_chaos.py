"""`midflight chaos` as a user runs it: a crash, another one in the restore after it, a killed flow run; and every named
point of the page lies on the way of a run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.chaos.judgement import RESUMED
from flows.home import HOME_VARIABLE
from flows.processes import marked_processes
from storage.fault_plan import FaultPlan
from storage.fault_points import POINTS

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

# The first one is a multi-turn run with a checkpoint after each step, and restores rows, tables and a model.
ARGUMENTS = ["--seed", "37", "--count", "2", "--kind", "kill-flow", "--kind", "crash-in-restore"]


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> tuple["subprocess.CompletedProcess[str]", Path]:
    """The command when it has ended, and the home that it has kept."""
    folder = tmp_path_factory.mktemp("chaos")
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "chaos", *ARGUMENTS, "--keep", "--json"],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=1000,
        check=False,
    )
    (home,) = folder.glob("midflight-chaos-*")
    return done, home


def test_the_runs_are_resumed_audited_and_cost_what_the_table_says(chaos):
    done, _ = chaos
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [(one["kind"], one["seed"]) for one in results] == [("crash-in-restore", 37), ("kill-flow", 38)]
    assert [(one["outcome"], one["problems"]) for one in results] == [(RESUMED, [])] * 2
    assert results[0]["starts"] >= 2
    assert results[0]["recover_s"] > 0


def test_a_run_passes_every_named_point(chaos):
    _, home = chaos
    assert FaultPlan(home / "faults", "crash-in-restore-37").visited() == POINTS.keys()


def test_nothing_of_it_is_left_running(chaos):
    _, home = chaos
    assert marked_processes(HOME_VARIABLE, str(home)) == []
