"""What a scenario is judged by: that its fault happened, and that the store holds a whole, trained run."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.chaos.judgement import BY_HAND, RESUMED, VIOLATION, WENT_ON, judge, outcome_of
from flows.chaos.play import TINY, Played
from flows.chaos.scenario import Kind, Role, scenario
from flows.chaos.victims import Victims
from flows.config_files import load_config
from storage.fault_plan import Action, Fault, FaultPlan
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import ManifestLog


@pytest.fixture
def judged(tmp_path):
    """Judges a scenario of a kind whose run lies in `tmp_path/store`, after `play` was given its name."""

    def make(kind, *, play=lambda run, store: None, exit_codes=(0,)):
        found = scenario(kind, 1)
        config = load_config(TINY, [f"name={found.run}", f"store.url={tmp_path}/store"])
        play(found.run, open_store(config.store.url))
        return judge(found, config, Played(exit_codes=list(exit_codes)), tmp_path / "faults", 1.0)

    return make


def test_a_run_that_left_nothing_is_a_violation(judged):
    result = judged(Kind.KILL_FLOW)
    assert result.outcome == VIOLATION
    assert any("holds no run" in problem for problem in result.problems)


def test_a_run_that_stopped_early_is_a_violation(judged):
    result = judged(Kind.KILL_FLOW, play=lambda run, store: ManifestLog(store, RunLayout(run), "writer").claim())
    assert result.outcome == VIOLATION
    assert "it trained 0 of 8 steps" in result.problems


def test_a_fault_that_never_happened_is_a_violation(judged, tmp_path):
    faults = scenario(Kind.DOUBLE_CRASH, 1).faults

    def play(run, store):
        FaultPlan.write(tmp_path / "faults", run, faults)
        FaultPlan(tmp_path / "faults", run).due(faults[0].point, "", pid=1, at=1.0)

    result = judged(Kind.DOUBLE_CRASH, play=play)
    assert any(problem.startswith("fault 1 never happened") for problem in result.problems)


@pytest.mark.parametrize(
    ("exit_codes", "outcome"),
    [((0,), WENT_ON), ((-9, 0), RESUMED), ((75, 75, 0), RESUMED), ((1, 0), BY_HAND), ((-9, 1, 0), BY_HAND)],
)
def test_the_outcome_says_who_started_the_run_again(exit_codes, outcome):
    assert outcome_of(Played(exit_codes=list(exit_codes))) == outcome


@pytest.fixture
def sleeping():
    """Starts processes that would run for a minute; killed and reaped afterwards."""
    started = []

    def start():
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def run_started(controller, generator, engine, trainer):
    generators = [{"pid": generator, "engine_pids": [engine]}]
    return {"event": "run_started", "pids": {"controller": controller, "generators": generators, "trainers": trainer}}


def test_a_kill_meets_the_newest_process_of_its_role_and_no_other(sleeping):
    victims, engine, heir, trainer = Victims(), sleeping(), sleeping(), sleeping()
    victims.learn([run_started(sleeping(), sleeping(), engine, [{"pid": trainer}])])
    victims.learn([{"event": "generator_restarted", "pids": {"pid": sleeping(), "engine_pids": [heir]}}])
    assert victims.kill(Role.ENGINE) == [Role.ENGINE]
    psutil.Process(heir).wait(10)
    left = {process.pid for process in victims.left_after(0)}
    assert heir not in left
    assert {engine, trainer} <= left


def test_everything_is_killed_the_controller_first_and_what_is_left_is_told(sleeping):
    victims = Victims()
    victims.learn([run_started(sleeping(), sleeping(), sleeping(), [{"pid": sleeping()}])])
    victims.put(Role.FLOW, sleeping())
    roles = victims.kill(Role.EVERYTHING)
    assert roles == [Role.CONTROLLER, Role.GENERATOR, Role.ENGINE, Role.TRAINER, Role.FLOW]
    assert victims.left_after(10) == []
    assert victims.kill(Role.FLOW) == []


def test_a_fault_plan_counts_visits_in_each_process_and_faults_in_all(tmp_path: Path):
    FaultPlan.write(tmp_path, "run", [Fault("part:*", Action.FAIL, visit=2, times=2)])
    one, other = FaultPlan(tmp_path, "run"), FaultPlan(tmp_path, "run")
    visits = [plan.due("part:read", "", pid=1, at=1.0) is not None for plan in (one, other, one, other, one)]
    assert visits == [False, False, True, True, False]
