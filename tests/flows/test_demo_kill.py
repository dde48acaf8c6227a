"""The demo kills at a moment that the trace shows, and only processes that the controller names."""

import os

import pytest

from flows.demo_kill import KillMoment, victims_of
from flows.driver import Driver
from flows.failures import DemoFailed
from flows.processes import ProcessId
from tasks.runtime import RuntimeStatus


def snapshot(step, *, sealed=3, running=5, outcome="completed"):
    return {
        "event": "snapshot_attempt",
        "outcome": outcome,
        "step": step,
        "sealed_siblings": sealed,
        "running_attempts": running,
        "sequence": 40 + step,
    }


STEP = {"event": "train_step", "step": 9}


@pytest.mark.parametrize(
    ("events", "sequence"),
    [
        ([snapshot(8)], 48),
        ([snapshot(7)], None),  # too early
        ([snapshot(8, sealed=0)], None),  # nothing to reuse
        ([snapshot(8, running=0)], None),  # nothing to lose
        ([{"event": "snapshot_attempt", "outcome": "skipped", "step": 8}], None),
        ([snapshot(8), STEP], None),  # overtaken by the step that followed
        ([snapshot(8), STEP, snapshot(9)], 49),
        ([], None),
    ],
)
def test_the_moment_is_a_snapshot_with_sealed_siblings_that_no_step_has_overtaken(events, sequence):
    found = KillMoment(after_step=8).find(events)
    assert (found and found["sequence"]) == sequence


def status(driver, pids):
    return RuntimeStatus("run", "inc", "running", 1, 1, 10, driver=driver, pids=pids)


def test_flow_controller_and_workers_are_the_victims():
    me = ProcessId.of_this()
    driver = Driver("train-run", "0" * 8 + "-0000-0000-0000-" + "0" * 12, "host", me)
    pids = {
        "controller": me.pid,
        "generators": [{"pid": me.pid, "engine_pids": [os.getppid()], "port": 5}],
        "trainers": [],
    }
    found = victims_of(status(str(driver), pids))
    assert set(found) == {"flow", "controller", "generators 0 pid", "generators 0 engine_pids 0"}
    assert found["flow"].pid == me.pid
    assert found["generators 0 engine_pids 0"].pid == os.getppid()


def test_a_run_without_a_flow_as_its_driver_is_not_killed():
    with pytest.raises(DemoFailed, match="no flow run as its driver"):
        victims_of(status("somebody", {}))
