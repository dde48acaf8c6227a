"""A Prefect API for flows that run in the test process, and a stored run that is restored."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary server, started once; yields the folder of its task results."""
    results = tmp_path_factory.mktemp("results")
    settings = {PREFECT_LOCAL_STORAGE_PATH: str(results), PREFECT_LOGGING_TO_API_ENABLED: False}
    with prefect_test_harness(server_startup_timeout=120), temporary_settings(settings):
        yield results


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
