"""A scenario is played by events and exit codes: the kill at its moment, then its faults, and starts until the end."""

import json
import subprocess
import sys

import psutil
import pytest

from flows.chaos.drivers import COMPLETED, CRASHED, FAILED
from flows.chaos.play import MORE_STARTS, Player
from flows.chaos.scenario import Kill, Kind, Role, Scenario
from flows.home import HOME_VARIABLE, Home
from storage.fault_plan import Action, Fault, FaultPlan

FAULT = Fault("restore:ledger", Action.KILL)


class Flow:
    """A flow run that has ended, or ends with `code` when the process `until` has."""

    def __init__(self, code, until=None):
        self.pid = None
        self._code = code
        self._until = until

    @property
    def exitcode(self):
        alive = self._until is not None and self._until.poll() is None
        return None if alive else self._code

    def join(self):
        return None


class Starts:
    """Drivers whose flow runs do as they are told, one after the other; the last one again and again."""

    def __init__(self, *flows):
        self._flows = list(flows)
        self.plans = []

    def start(self, config, log):
        self.plans.append(FaultPlan(log.parents[2] / "faults", config.name).faults)
        flow = self._flows.pop(0) if len(self._flows) > 1 else self._flows[0]
        return flow() if callable(flow) else flow


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Plays a scenario with these starts in a home of its own."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))

    def start(scenario, starts):
        player = Player(Home(tmp_path), starts, tmp_path / "faults")
        return player.play(scenario)[1]

    return start


@pytest.fixture
def controller():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_run_is_started_again_until_it_is_trained(play):
    starts = Starts(Flow(CRASHED), Flow(-9), Flow(FAILED), Flow(COMPLETED))
    played = play(Scenario(Kind.KILL_AT_POINT, 1, {}, faults=(FAULT,)), starts)
    assert (played.exit_codes, played.problems) == ([CRASHED, -9, FAILED, COMPLETED], [])
    assert played.needed_a_person
    assert starts.plans[0] == (FAULT,)


def test_a_run_that_never_gets_up_is_given_up(play):
    played = play(Scenario(Kind.KILL_AT_POINT, 1, {}, faults=(FAULT,)), Starts(Flow(CRASHED)))
    assert played.exit_codes == [CRASHED] * (1 + 1 + MORE_STARTS)
    assert not played.needed_a_person


def test_a_moment_that_never_came_is_a_problem(play):
    kill = Kill(Role.CONTROLLER, "train_step", 2)
    played = play(Scenario(Kind.KILL_CONTROLLER, 1, {}, kill=kill), Starts(Flow(COMPLETED)))
    assert played.problems == ["the moment of its kill never came: controller after train_step 2"]
    assert played.kills_at == []


def test_the_faults_after_a_kill_are_planned_once_it_has_happened(play, tmp_path, controller):
    scenario = Scenario(Kind.CRASH_IN_RESTORE, 1, {}, kill=Kill(Role.CONTROLLER, "train_step", 2), faults=(FAULT,))

    def live():
        pids = {"controller": controller.pid, "generators": [], "trainers": []}
        lines = [{"event": "run_started", "pids": pids}, {"event": "train_step"}, {"event": "train_step"}]
        trace = tmp_path / "store" / scenario.run / "trace"
        trace.mkdir(parents=True)
        told = [json.dumps({"t": 1.0, "run_process": "a", **line}) for line in lines]
        (trace / "a.jsonl").write_text("\n".join(told) + "\n")
        return Flow(CRASHED, until=controller)

    starts = Starts(live, Flow(COMPLETED))
    played = play(scenario, starts)
    assert (played.exit_codes, played.problems, len(played.kills_at)) == ([CRASHED, COMPLETED], [], 1)
    assert starts.plans == [(), (FAULT,)]
    assert not psutil.pid_exists(controller.pid) or controller.poll() == -9
