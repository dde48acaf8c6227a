"""A Prefect API for flows that run in the test process, a stored run and its restore, and commands about it."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from flows.cli import main
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log

STORE = Path(__file__).resolve().parents[1] / "storage/formats/trained-run"


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary server, started once; yields the folder of its task results."""
    results = tmp_path_factory.mktemp("results")
    settings = {PREFECT_LOCAL_STORAGE_PATH: str(results), PREFECT_LOGGING_TO_API_ENABLED: False}
    with prefect_test_harness(server_startup_timeout=120), temporary_settings(settings):
        yield results


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of this home: run `demo`, which was trained for one step, with checkpoint 1 and snapshot 2."""
    folder = tmp_path / "home" / "store"
    shutil.copytree(STORE, folder)
    monkeypatch.setenv("MIDFLIGHT_HOME", str(folder.parent))
    monkeypatch.setenv("COLUMNS", "200")
    return folder


@pytest.fixture
def midflight(capsys: pytest.CaptureFixture[str], store: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in that home: exit code, standard output, standard error without the frame of a panel."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, " ".join(shown.err.replace("│", " ").split())

    return run


def _restore_again(store: Path) -> Manifest:
    """The trace of a process that restored snapshot 2, launched one sibling again and sealed it."""
    snapshot = read_log(open_store(str(store)), RunLayout("demo"))[2]
    assert isinstance(snapshot, Manifest)
    t = snapshot.created_at + 1000
    facts = {"sequence": 2, "anchor_sequence": 1, "step": snapshot.step, "steps_to_replay": 0}
    facts |= {"groups_buffered": snapshot.counts["buffered_groups"], "groups_unfinished": 1, "tokens_kept": 11}
    facts |= {"siblings_reused": 1, "siblings_resumed": 0, "siblings_rerun": 1, "turns_kept": 0}
    rollout = {"rollout_id": "e0-p9_g1", "attempt": 1}
    told: list[dict[str, Any]] = [
        {"event": "attempt_abandoned", "rollout_id": "e0-p9_g1", "attempt": 0, "reason": "restart"},
        {"event": "checkpoint_restored", **facts},
        {"event": "redispatched", "group_id": "e0-p9", "siblings": [1]},
        {"event": "attempt_dispatched", **rollout},
        {"event": "attempt_sealed", **rollout, "num_tokens": 7},
    ]
    lines = [json.dumps({"t": t + n, "run_process": "second", **event}) for n, event in enumerate(told)]
    (store / "demo/trace/second.jsonl").write_text("\n".join(lines) + "\n")
    return snapshot


@pytest.fixture
def restored_again() -> Callable[[Path], Manifest]:
    """Give a copy of the trained run a process that restored its snapshot 2; returns the snapshot."""
    return _restore_again
