"""`midflight verify`: a run or a store, for people and machines; what it keeps is shown, what is wrong is one error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import FAILURE, MISTAKE

Run = Callable[..., tuple[int, str, str]]


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _flip(store: Path, pattern: str) -> Path:
    path = next(store.glob(pattern))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    return path


def test_a_run_and_a_whole_store_are_verified_and_a_drill_restores_them(midflight: Run) -> None:
    assert midflight("fork", "demo", "2", "second")[0] == 0
    code, shown, error = midflight("verify", "demo")
    assert (code, shown.count("as published"), "restored" in shown, error) == (0, 2, False, "")
    code, shown, _ = midflight("verify", "--drill")
    assert (code, shown.count("as published, and restored")) == (0, 4)
    code, machine, _ = midflight("verify", "--json", "--no-record")
    found = json.loads(machine)
    assert [(run["run"], run["bad"], len(run["checks"])) for run in found["runs"]] == [("demo", 0, 2), ("second", 0, 2)]


def test_what_is_bad_is_named_kept_shown_and_not_restored(midflight: Run, store: Path) -> None:
    damaged = _flip(store, "demo/state/trained-5c66*")
    code, shown, error = midflight("verify", "demo")
    assert (code, damaged.name in shown, damaged.name in error) == (FAILURE, True, True)
    code, machine, error = midflight("verify", "demo", "--json")
    checks = json.loads(machine)["runs"][0]["checks"]
    assert (code, [bool(check["problem"]) for check in checks], damaged.name in error) == (FAILURE, [False, True], True)
    assert "2: bad: demo/state/trained" in " ".join(midflight("snapshots", "demo")[1].split())
    listed = json.loads(midflight("snapshots", "demo", "--json")[1])
    assert [bool(bundle["verification"]["problem"]) for bundle in listed] == [False, True]
    assert "bad since" in midflight("show", "demo", "2")[1]
    facts = json.loads(midflight("show", "demo", "1", "--json")[1])
    assert (facts["verification"]["problem"], facts["verification"]["drill"], facts["warnings"]) == (None, False, [])
    found = json.loads(midflight("query", "demo", "SELECT count(*) AS n FROM groups", "--json")[1])
    held = json.loads(midflight("query", "demo", "SELECT count(*) AS n FROM groups", "--snapshot", "1", "--json")[1])
    assert found == held, "the checkpoint is what would be restored"


def test_a_verdict_that_cannot_be_read_is_named(midflight: Run, store: Path) -> None:
    midflight("verify", "demo")
    (store / "demo/verifications/00000002.json").write_bytes(b"?")
    assert "00000002.json: " in " ".join(midflight("snapshots", "demo")[1].split())
    assert "it is ignored" in midflight("show", "demo", "2")[1].replace("\n", " ")


def test_without_recording_the_store_stays_as_it_is(midflight: Run, store: Path) -> None:
    _flip(store, "demo/parts/514c*")
    before = _content(store)
    assert midflight("verify", "demo", "--no-record", "--drill")[0] == FAILURE
    assert _content(store) == before


def test_a_manifest_that_was_copied_in_from_another_run_is_named(midflight: Run, store: Path) -> None:
    midflight("fork", "demo", "2", "second")
    shutil.copy(store / "second/manifests/00000001.json", store / "demo/manifests/00000003.json")
    before = _content(store)
    code, _, error = midflight("verify", "demo", "--no-record")
    assert (code, "holds manifest 1 of run second; it was moved" in error) == (FAILURE, True)
    assert _content(store) == before


@pytest.mark.parametrize(
    ("arguments", "expected", "says"),
    [
        (("verify", "nobody"), FAILURE, "holds no run 'nobody': it holds demo"),
        (("verify", "../home"), MISTAKE, "'../home' is no name of a run"),
        (("verify", "configs/tiny.yaml"), MISTAKE, "is no name of a run"),
        (("trace", "configs/tiny.yaml"), MISTAKE, "is no name of a run"),
        (("verify", "--store", "nowhere://bucket"), MISTAKE, "nowhere"),
        (("verify", "demo", "--store", "nowhere://bucket"), MISTAKE, "install the fsspec driver or correct the URL"),
        (("verify", "--store", "{home}/nothing"), FAILURE, "holds no run at all"),
        (("verify", "--store", "{home}/store/demo"), FAILURE, "holds no run at all; is --store (store_url) right?"),
        (("verify", "demo", "--store", "{home}/store/demo/run.json"), FAILURE, "holds no run"),
    ],
)
def test_a_mistake_is_one_clear_error_and_changes_nothing(
    midflight: Run, store: Path, arguments: tuple[str, ...], expected: int, says: str
) -> None:
    before = _content(store)
    code, _, error = midflight(*(argument.format(home=store.parent) for argument in arguments))
    assert (code, says in error, "Traceback" in error) == (expected, True, False), error
    assert _content(store) == before


def test_times_that_no_clock_shows_are_shown_all_the_same(midflight: Run, store: Path) -> None:
    from storage.manifests import decode_manifest, encode_manifest

    path = store / "demo/manifests/00000002.json"
    skewed = decode_manifest(path.read_bytes(), "x").model_copy(update={"created_at": 1e18, "cut_time": 1e18})
    path.write_bytes(encode_manifest(skewed))
    for command in (("snapshots", "demo"), ("show", "demo", "2"), ("runs",), ("verify", "demo"), ("prune", "demo")):
        code, shown, error = midflight(*command)
        assert (code, error) == (0, ""), shown
    assert "in the future" in midflight("verify", "demo")[1]
