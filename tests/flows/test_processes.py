"""Processes are ended by identity, never by a pid that may be somebody else's by now."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from flows.processes import (
    ProcessId,
    end_processes,
    free_port,
    kill,
    marked_processes,
    start_detached,
    tail,
    tied_to_parent,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)",
]


@pytest.fixture
def start(tmp_path):
    started: list[ProcessId] = []

    def start(command, **variables):
        process = start_detached(command, environment={**os.environ, **variables}, log=tmp_path / "log", cwd=tmp_path)
        started.append(process)
        return process

    yield start
    for process in started:
        kill(process)


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_pid_with_another_start_time_is_another_process(start):
    process = start(SLEEP)
    impostor = ProcessId(pid=process.pid, start_time=process.start_time - 100)
    assert not impostor.is_alive()
    assert not kill(impostor)
    assert process.is_alive()


def test_a_killed_process_is_not_alive_even_before_it_is_reaped(start):
    process = start(SLEEP)
    assert kill(process)
    wait_until(lambda: not process.is_alive())


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(start, tmp_path):
    process = start(STUBBORN)
    wait_until(lambda: "ready" in (tmp_path / "log").read_text())
    end_processes([process.process()], grace_s=0.2)
    assert not process.is_alive()


def test_marked_descendants_are_found_after_their_parent_died(start):
    parent = start(
        [sys.executable, "-c", f"import subprocess, time; subprocess.Popen({SLEEP!r}); time.sleep(60)"],
        MIDFLIGHT_TEST_MARK="m1",
    )
    wait_until(lambda: len(marked_processes("MIDFLIGHT_TEST_MARK", "m1")) == 2)
    kill(parent)
    wait_until(lambda: not parent.is_alive())
    orphans = marked_processes("MIDFLIGHT_TEST_MARK", "m1")
    assert len(orphans) == 1
    end_processes(orphans, grace_s=1)
    assert marked_processes("MIDFLIGHT_TEST_MARK", "m1") == []


def test_a_process_that_hid_its_mark_is_found_by_its_session_or_its_parents(start):
    hide = "import os, time; time.sleep(60)"
    program = (
        "import os, subprocess, time\n"
        f"subprocess.Popen([{sys.executable!r}, '-c', {hide!r}], env={{}}, start_new_session=True)\n"
        f"subprocess.Popen([{sys.executable!r}, '-c', {hide!r}], env={{}})\n"
        "time.sleep(60)\n"
    )
    leader = start([sys.executable, "-c", program], MIDFLIGHT_TEST_MARK="m3")

    def family():
        return marked_processes("MIDFLIGHT_TEST_MARK", "m3", sessions=[leader])

    wait_until(lambda: len(family()) == 3)
    everyone = family()
    kill(leader)
    wait_until(lambda: len(family()) == 1)  # the session is left; the other one is nobody's child any more
    end_processes(everyone, grace_s=1)
    assert family() == []


def test_a_session_whose_leaders_pid_is_somebody_elses_is_not_ours(start):
    other = start(SLEEP)
    impostor = ProcessId(pid=other.pid, start_time=other.start_time - 100)
    assert marked_processes("MIDFLIGHT_TEST_MARK", "nobody", sessions=[impostor]) == []


def test_a_tied_process_dies_with_its_parent(start):
    program = (
        "import subprocess, sys, time\n"
        "from flows.processes import tied_to_parent\n"
        "subprocess.Popen(tied_to_parent([sys.executable, '-c', 'import time; time.sleep(60)']))\n"
        "time.sleep(60)\n"
    )
    parent = start([sys.executable, "-c", program], MIDFLIGHT_TEST_MARK="m2")

    def child_sleeps() -> bool:
        found = [p for p in marked_processes("MIDFLIGHT_TEST_MARK", "m2") if p.pid != parent.pid]
        return any("flows.tied_process" not in p.cmdline() for p in found)

    wait_until(child_sleeps)
    kill(parent)
    wait_until(lambda: marked_processes("MIDFLIGHT_TEST_MARK", "m2") == [])


def test_a_tied_process_has_default_signals_whatever_its_parent_ignored(start, tmp_path):
    shown = "import signal; print([str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)])"
    program = (
        "import signal, subprocess, sys\n"
        "from flows.processes import tied_to_parent\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"subprocess.run(tied_to_parent([sys.executable, '-c', {shown!r}]))\n"
    )
    start([sys.executable, "-c", program])
    wait_until(lambda: "]" in (tmp_path / "log").read_text())
    shown_handlers = (tmp_path / "log").read_text()
    assert "default_int_handler" in shown_handlers  # what Python makes of the default
    assert str(signal.SIG_IGN) not in shown_handlers


def test_a_free_port_is_on_nobodys_list_and_no_connection_is_given_it():
    lowest, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 40
    assert max(ports) < lowest


def test_the_tail_of_a_missing_log_says_so(tmp_path):
    assert "no log" in tail(tmp_path / "nothing.log")


def test_a_tied_command_names_this_process_as_its_parent():
    assert str(os.getpid()) in tied_to_parent(["true"])
