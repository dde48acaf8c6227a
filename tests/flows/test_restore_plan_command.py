"""`midflight restore-plan`, and what `midflight train` says of a restore before and after."""

import io
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from flows.cli import FAILURE
from flows.restore_plan_command import show_outcome, show_plan
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from storage.run_config import RunConfig

Run = Callable[..., tuple[int, str, str]]


def test_the_plan_agrees_with_the_manifest_of_the_bundle_that_would_be_restored(midflight: Run, store: Path) -> None:
    snapshot = read_log(open_store(str(store)), RunLayout("demo"))[2]
    assert isinstance(snapshot, Manifest)
    counts = snapshot.counts
    code, shown, _ = midflight("restore-plan", "demo", "--json")
    told = json.loads(shown)
    planned = told["next"]["figures"]
    assert (code, told["last"], told["next"]["sequence"]) == (0, None, 2)
    assert planned["groups_reused"] == counts["buffered_groups"]
    assert planned["groups_unfinished"] == counts["ledger_groups"]
    assert planned["siblings_reused"] == counts["reusable_siblings"]
    assert planned["siblings_rerun"] == counts["siblings"] - counts["reusable_siblings"]
    assert planned["tokens_kept"] == counts["buffered_tokens"] + counts["reusable_tokens"]
    assert planned["attempts_dropped"] == counts["running_attempts"]
    assert planned["generation_s"] > 0
    code, shown, _ = midflight("restore-plan", "demo")
    assert "If restored now: from 00000002" in shown
    assert "actual" not in shown


def test_the_last_restore_stands_beside_its_plan(
    midflight: Run, store: Path, restored_again: Callable[[Path], Manifest]
) -> None:
    restored_again(store)
    code, shown, _ = midflight("restore-plan", "demo", "--json")
    last = json.loads(shown)["last"]
    actual = last["outcome"]["figures"]
    assert (code, last["sequence"], last["outcome"]["is_complete"]) == (0, 2, True)
    assert (actual["tokens_to_generate"], actual["generation_s"], actual["attempts_dropped"]) == (7, 2.0, 1)
    assert last["plan"]["siblings_rerun"] > 1
    code, shown, _ = midflight("restore-plan", "demo")
    assert "Restored from 00000002" in shown
    assert "planned" in shown
    assert "actual" in shown


def test_a_run_that_is_not_there_has_no_plan(midflight: Run) -> None:
    assert midflight("restore-plan", "nobody")[0] == FAILURE


def _console() -> Console:
    return Console(file=io.StringIO(), width=200)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_training_tells_what_a_restore_would_come_to_and_afterwards_what_it_came_to(
    store: Path, restored_again: Callable[[Path], Manifest]
) -> None:
    config = RunConfig.model_validate({"name": "demo", "store": {"url": str(store)}})
    before, after = _console(), _console()
    planned = show_plan(config, before)
    assert planned is not None
    assert "If demo has to be restored: 00000002" in _text(before)
    show_outcome(config, planned, after)
    assert _text(after) == "", "its runtime still lived: nothing was restored"
    restored_again(store)
    show_outcome(config, planned, after)
    assert "Restored from 00000002" in _text(after)
    assert f"{planned.figures.siblings_rerun}" in _text(after)


def test_training_says_nothing_of_a_run_that_is_new_or_cannot_be_restored(store: Path) -> None:
    console = _console()
    assert show_plan(RunConfig.model_validate({"name": "new", "store": {"url": str(store)}}), console) is None
    for path in (store / "demo/parts").iterdir():
        path.write_bytes(b"?")
    assert show_plan(RunConfig.model_validate({"name": "demo", "store": {"url": str(store)}}), console) is None
    assert _text(console) == ""
