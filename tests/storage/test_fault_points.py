"""Fault points: off unless the process was started with them, exact when they are on, and never passed by unnoticed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.backends import MemoryBackend
from storage.canonical import canonical_json
from storage.errors import BrokenInvariant, StoreOutcomeUnknown, StoreUnavailable
from storage.fault_plan import Action, Fault, FaultPlan
from storage.fault_points import POINTS, VARIABLE, FaultInjection, injection, planned_faults
from storage.faulty_backend import FaultyBackend, flipped
from storage.filesystem import GuardedStore, open_store
from storage.layout import RunLayout
from storage.manifests import ManifestLog
from storage.trace_reader import read_events

ROOT = Path(__file__).resolve().parents[2]
PATHS = {
    "run-record": "run/run.json",
    "claim": "run/manifests/00000000.json",
    "part": "run/parts/ab.parquet",
    "table": "run/state/ledger-ab.parquet",
    "model-file": "run/checkpoints/step_000001-x/model.safetensors",
    "sign-of-life": "run/owners/x.json",
}
KILLED = -9
PROGRAM = """
import sys
from storage.filesystem import open_store
from storage.fault_points import reached
from storage.layout import RunLayout
from storage.trace import TraceWriter
store = open_store(sys.argv[1])
for line in sys.argv[2:]:
    verb, path = line.split("=")
    if verb == "reached":
        reached(path, "run")
    elif verb == "trace":
        TraceWriter(store, RunLayout(path), process="p", run_process="p").close()
    else:
        getattr(store, verb)(path, *([b"01234567"] if verb in ("write", "create_exclusive") else []))
    print(line, flush=True)
"""


def started(folder: Path | None, store: Path, *calls: str) -> tuple[int, list[str]]:
    """The exit code of a process that makes these calls of a store, and those that returned."""
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE} | ({VARIABLE: str(folder)} if folder else {})
    command = [sys.executable, "-c", PROGRAM, str(store), *calls]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60, check=False)
    assert done.returncode in (0, KILLED), done.stderr
    return done.returncode, done.stdout.split()


@pytest.fixture
def faulty(tmp_path: Path) -> Callable[..., tuple[Any, FaultPlan]]:
    """A store in memory whose run `run` meets these faults, and their plan."""

    def make(*faults: Fault) -> tuple[Any, FaultPlan]:
        FaultPlan.write(tmp_path / "faults", "run", faults)
        backend = FaultyBackend(MemoryBackend(), FaultInjection(tmp_path / "faults"))
        return GuardedStore("memory://", backend, deadline_s=60), FaultPlan(tmp_path / "faults", "run")

    return make


def test_without_the_variable_a_plan_has_no_effect(tmp_path: Path) -> None:
    FaultPlan.write(tmp_path / "faults", "run", [Fault("*", Action.KILL)])
    assert (injection(), planned_faults("run")) == (None, None)
    calls = [f"write={PATHS['part']}", "reached=snapshot:cut"]
    assert started(None, tmp_path / "store", *calls) == (0, calls)
    assert list((tmp_path / "faults").iterdir()) == [tmp_path / "faults" / "run.json"]


def test_a_run_without_a_plan_has_no_faults_in_a_process_that_could_have_some(tmp_path: Path) -> None:
    FaultPlan.write(tmp_path / "faults", "another", [Fault("*", Action.KILL)])
    calls = [f"write={PATHS['part']}", "reached=snapshot:cut"]
    assert started(tmp_path / "faults", tmp_path / "store", *calls) == (0, calls)


def test_a_trace_says_which_faults_are_planned_for_its_run(tmp_path: Path) -> None:
    FaultPlan.write(tmp_path / "faults", "run", [Fault("part:read", Action.FULL, visit=3)])
    assert started(tmp_path / "faults", tmp_path / "store", "trace=run", "trace=another")[0] == 0
    store = open_store(str(tmp_path / "store"))
    (told,) = read_events(store, RunLayout("run"))
    assert (told["event"], told["faults"]["0"]["point"], told["faults"]["0"]["action"]) == (
        *("faults_planned", "part:read", "full"),
    )
    assert read_events(store, RunLayout("another")) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_comes_before_or_after_the_write_that_it_names(tmp_path: Path, moment: str) -> None:
    FaultPlan.write(tmp_path / "faults", "run", [Fault(f"table:{moment}-write", Action.KILL, visit=2)])
    other = "run/state/rows-cd.parquet"
    calls = [f"write={PATHS['part']}", f"write={PATHS['table']}", f"write={other}", f"write={PATHS['sign-of-life']}"]
    assert started(tmp_path / "faults", tmp_path / "store", *calls) == (KILLED, calls[:2])
    assert open_store(str(tmp_path / "store")).exists(other) is (moment == "after")
    # It has happened: the process that follows does not meet it again.
    assert started(tmp_path / "faults", tmp_path / "store", *calls) == (0, calls)


def test_the_next_fault_is_armed_when_the_one_before_has_happened(tmp_path: Path) -> None:
    first, second = Fault("snapshot:cut", Action.KILL), Fault("part:read", Action.KILL)
    FaultPlan.write(tmp_path / "faults", "run", [first, second])
    calls = [f"write={PATHS['part']}", f"read={PATHS['part']}", "reached=snapshot:cut"]
    assert started(tmp_path / "faults", tmp_path / "store", *calls) == (KILLED, calls[:2])
    assert started(tmp_path / "faults", tmp_path / "store", *calls) == (KILLED, calls[:1])
    assert started(tmp_path / "faults", tmp_path / "store", *calls) == (0, calls)
    plan = FaultPlan(tmp_path / "faults", "run")
    assert [(found.number, found.point) for found in plan.happened()] == [(0, "snapshot:cut"), (1, "part:read")]
    assert plan.visited() == {"part:before-write", "part:after-write", "part:read", "snapshot:cut"}


def test_a_torn_file_has_its_final_name_and_half_of_its_bytes(tmp_path: Path) -> None:
    FaultPlan.write(tmp_path / "faults", "run", [Fault("part:before-write", Action.TEAR)])
    call = f"write={PATHS['part']}"
    assert started(tmp_path / "faults", tmp_path / "store", call) == (KILLED, [])
    assert open_store(str(tmp_path / "store")).read(PATHS["part"]) == b"0123"


@pytest.mark.parametrize("kind", sorted(PATHS.keys() - {"claim"}))
def test_every_kind_of_file_has_its_points(faulty: Callable[..., Any], kind: str) -> None:
    store, plan = faulty()
    store.write(PATHS[kind], b"01234567")
    assert store.read(PATHS[kind]) == b"01234567"
    store.delete(PATHS[kind])
    moments = ("before-write", "after-write", "read", "before-delete", "after-delete")
    assert plan.visited() == {f"{kind}:{moment}" for moment in moments} & POINTS.keys()


def test_the_kind_of_a_manifest_is_read_from_it(faulty: Callable[..., Any], open_run: Callable[..., Any]) -> None:
    store, plan = faulty()
    run = open_run(store, name="run").claim()
    run.checkpoint(1, buffered=(1,))
    run.snapshot(buffered=(1, 2))
    written = {f"{kind}:after-write" for kind in ("claim", "checkpoint-manifest", "snapshot-manifest", "table", "part")}
    assert written <= plan.visited()


def test_a_failing_store_fails_so_often_and_then_is_well(faulty: Callable[..., Any]) -> None:
    store, plan = faulty(Fault("*:before-write", Action.FAIL, visit=2, times=2))
    store.write(PATHS["part"], b"1")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="input/output error"):
            store.write(PATHS["part"], b"2")
    store.write(PATHS["part"], b"3")
    assert store.read(PATHS["part"]) == b"3"
    assert plan.spent(0)


def test_an_answer_that_was_lost_leaves_the_outcome_unknown(faulty: Callable[..., Any]) -> None:
    store, _ = faulty(Fault("run-record:after-write", Action.FAIL))
    with pytest.raises(StoreOutcomeUnknown):
        store.create_exclusive(PATHS["run-record"], b"{}")
    assert store.read(PATHS["run-record"]) == b"{}"


def test_a_full_store_says_so_and_holds_nothing_more(faulty: Callable[..., Any]) -> None:
    store, _ = faulty(Fault("table:before-write", Action.FULL))
    with pytest.raises(StoreUnavailable, match="the store is full"):
        store.write(PATHS["table"], b"1")
    assert not store.exists(PATHS["table"])


def test_a_flipped_bit_is_one_bit_and_nobody_is_told(faulty: Callable[..., Any]) -> None:
    store, plan = faulty(Fault("table:after-write", Action.FLIP))
    data = bytes(range(64))
    store.write(PATHS["table"], data)
    held = store.read(PATHS["table"])
    assert held == flipped(data)
    assert sum((a ^ b).bit_count() for a, b in zip(held, data, strict=True)) == 1
    assert plan.happened()[0].path == PATHS["table"]


def test_a_slow_answer_comes(faulty: Callable[..., Any]) -> None:
    store, plan = faulty(Fault("part:read", Action.SLOW, seconds=0.01))
    store.write(PATHS["part"], b"1")
    assert store.read(PATHS["part"]) == b"1"
    assert plan.spent(0)


def test_a_point_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenInvariant, match="snapshot:cutt"):
        FaultInjection(tmp_path).reached("snapshot:cutt", "run")


def test_nothing_but_a_kill_can_happen_where_nothing_is_written(tmp_path: Path) -> None:
    FaultPlan.write(tmp_path, "run", [Fault("snapshot:cut", Action.FULL)])
    with pytest.raises(BrokenInvariant, match="plan a kill there"):
        FaultInjection(tmp_path).reached("snapshot:cut", "run")


def test_every_point_that_the_code_names_is_listed_and_the_other_way_round() -> None:
    sources = [path.read_text() for folder in ("gpu_workers", "tasks") for path in (ROOT / folder).rglob("*.py")]
    named = {name for source in sources for name in re.findall(r'reached\("([a-z:-]+)"', source)}
    links = {point for point in POINTS if point.startswith("restore:")}
    assert named | links == {p for p in POINTS if "write" not in p and "delete" not in p and not p.endswith(":read")}


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    faults = (Fault("part:read", Action.SLOW, visit=3, times=4, seconds=0.5), Fault("claim:after-write", Action.KILL))
    FaultPlan.write(tmp_path, "run", faults)
    assert FaultPlan(tmp_path, "run").faults == faults
    assert json.loads((tmp_path / "run.json").read_text())[1]["action"] == "kill"


def test_a_claim_whose_answer_was_lost_is_known_for_its_own(faulty: Callable[..., Any]) -> None:
    store, plan = faulty(Fault("claim:after-write", Action.FAIL))
    claimed = ManifestLog(store, RunLayout("run"), "writer").claim()
    assert plan.spent(0)
    assert canonical_json(claimed.model_dump(mode="json")) in store.read(RunLayout("run").manifest(0))
