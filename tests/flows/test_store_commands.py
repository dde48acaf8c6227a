"""Commands that look into a store: what they say to people and machines, and what they refuse."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import FAILURE, MISTAKE, main

STORE = Path(__file__).resolve().parents[1] / "storage/formats/version-1"
WITH_CALLS = STORE.parent / "version-3"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def midflight(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command in a home whose store holds run `demo`: checkpoint 1 and snapshot 2."""
    monkeypatch.setenv("MIDFLIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    shutil.copytree(STORE, tmp_path / "home" / "store")

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out + " ".join(shown.err.replace("│", " ").split())

    return run


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "arguments",
    [
        ("runs",),
        ("snapshots", "demo"),
        ("snapshots", "demo", "--all"),
        ("show", "demo", "2"),
        ("diff", "demo/1", "demo/2"),
        ("prune", "demo"),
        ("query", "demo", "SELECT * FROM rows"),
        ("query", "demo", "SELECT * FROM groups"),
        ("query", "demo", "SELECT count(*) AS calls FROM calls"),
        ("query", "demo", "SELECT * FROM trace"),
        ("query", "demo", "SELECT * FROM snapshots"),
    ],
)
def test_looking_changes_nothing_and_speaks_to_people_and_machines(
    midflight: Run, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    before = _content(tmp_path / "home")
    code, shown = midflight(*arguments)
    assert (code, "demo" in shown or arguments[0] == "query") == (0, True)
    code, machine = midflight(*arguments, "--json")
    assert code == 0
    assert json.loads(machine)
    assert _content(tmp_path / "home") == before


def test_a_bundle_is_shown_with_owners_files_anchor_and_model_step(midflight: Run) -> None:
    facts = json.loads(midflight("show", "demo", "2", "--json")[1])
    assert facts["owners"] == {"trained": 1, "buffer": 2, "ledger": 2, "spares": 1, "dropped": 1}
    assert (facts["kind"], facts["step"], facts["model_step"]) == ("rollout_snapshot", 2, 1)
    assert facts["anchor"] == {"kind": "checkpoint", "step": 1, "sequence": 1}
    assert sum(file["bytes"] for file in facts["files"]) == facts["bytes"]
    assert facts["age_s"] > 0
    assert "checkpoint 1 of step 1" in midflight("show", "demo", "2", "--files")[1]


def test_a_difference_tells_what_happened_between_two_bundles(midflight: Run) -> None:
    found = json.loads(midflight("diff", "demo/1", "demo/2", "--json")[1])
    assert found["appeared"] == ["e0-p10", "e0-p6", "e0-p7", "e0-p8", "e0-p9"]
    assert (found["published"], found["trained"], found["dropped"]) == (["e0-p6"], ["e0-p4"], ["e0-p10"])
    assert found["sealed"] == ["e0-p6_g0", "e0-p6_g1", "e0-p7_g0", "e0-p8_g0"]
    assert found["counts"]["train_steps"] == [1, 2]
    back = json.loads(midflight("diff", "demo/2", "demo/1", "--json")[1])
    assert (back["trained"], len(back["absent"])) == ([], 4)


def test_running_calls_are_shown_listed_compared_and_asked_for(midflight: Run, tmp_path: Path) -> None:
    store = shutil.copytree(WITH_CALLS, tmp_path / "with-calls")

    def ask(*arguments: str) -> str:
        code, shown = midflight(*arguments, "--store", str(store))
        assert code == 0
        return shown

    counts = json.loads(ask("show", "demo", "2", "--json"))["counts"]
    assert (counts["partial_calls"], counts["partial_tokens"]) == (1, 5)
    assert "partial tokens" in ask("show", "demo", "2")
    found = json.loads(ask("diff", "demo/1", "demo/2", "--json"))
    assert (found["calls_went_on"], found["counts"]["partial_tokens"]) == (["e0-p12_g1/a0/t0"], [0, 5])
    assert json.loads(ask("diff", "demo/2", "demo/1", "--json"))["calls_ended"] == ["e0-p12_g1/a0/t0"]
    assert "model calls that went on" in ask("diff", "demo/1", "demo/2")
    (call,) = json.loads(ask("query", "demo", "SELECT * FROM calls", "--json"))
    assert (call["call"], call["num_tokens"], call["num_rows"]) == ("e0-p12_g1/a0/t0", 5, 2)
    assert (call["sampling"], call["finish_reason"]) == ("counter", "")
    joined = "SELECT g.level, r.kind FROM calls c JOIN rows r ON r.rollout_id = c.rollout_id JOIN groups g"
    found = json.loads(ask("query", "demo", f"{joined} ON g.group_id = c.group_id", "--json"))
    assert found == [{"level": "prefix", "kind": "partial_tokens"}] * 2


def test_sql_answers_from_all_frames(midflight: Run) -> None:
    joined = "SELECT g.owner, count(*) AS n FROM groups g JOIN rows r ON r.group_id = g.group_id GROUP BY g.owner"
    found = json.loads(midflight("query", "demo", f"{joined} ORDER BY g.owner", "--json")[1])
    assert [(line["owner"], line["n"]) for line in found] == [("ledger", 2), ("replay_buffer", 4), ("trained", 2)]
    steps = "SELECT max(step) AS last FROM trace WHERE event = 'train_step'"
    assert json.loads(midflight("query", "demo", steps, "--json")[1]) == [{"last": 2}]
    older = "SELECT count(*) AS n FROM groups"
    assert json.loads(midflight("query", "demo", older, "--snapshot", "1", "--json")[1]) == [{"n": 2}]
    assert (
        "1 more lines: raise --limit" in midflight("query", "demo", "SELECT sequence FROM snapshots", "--limit", "1")[1]
    )


def test_a_fork_is_made_and_listed_with_its_origin(midflight: Run) -> None:
    code, shown = midflight("fork", "demo", "2", "second", "--json")
    assert (code, json.loads(shown)["forked_from"]) == (0, {"run": "demo", "sequence": 2})
    assert "demo/2" in midflight("runs")[1]
    found = json.loads(midflight("diff", "demo/2", "second/1", "--json")[1])
    assert {name: value for name, value in found.items() if value and name not in ("a", "b")} == {}
    assert midflight("fork", "demo", "2", "second")[0] == MISTAKE
    assert midflight("fork", "demo", "1", "third")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected", "says"),
    [
        (("show", "nobody", "1"), FAILURE, "holds no run 'nobody': it holds demo"),
        (("show", "configs/tiny.yaml", "1"), MISTAKE, "'configs/tiny.yaml' is no name of a run"),
        (("show", "../home", "1"), MISTAKE, "'../home' is no name of a run"),
        (("snapshots", "../home"), MISTAKE, "'../home' is no name of a run"),
        (("show", "demo", "9"), FAILURE, "9 is not there; its snapshots and checkpoints are 1, 2"),
        (("show", "demo", "0"), FAILURE, "0 is a claim of the log"),
        (("diff", "demo/1", "2"), MISTAKE, "'2' names no bundle: give RUN/SNAPSHOT"),
        (("diff", "demo/1", "demo/9"), FAILURE, "9 is not there"),
        (("prune", "nobody"), FAILURE, "holds no run 'nobody'"),
        (("prune", "demo", "--apply"), FAILURE, "its controller may be live"),
        (("prune", "demo", "--take-over"), MISTAKE, "--take-over is given without --apply"),
        (("fork", "demo", "9", "second"), FAILURE, "9 is not there"),
        (("fork", "demo", "2", "demo"), MISTAKE, "holds a run 'demo' already: choose another name"),
        (("fork", "demo", "2", "A B"), MISTAKE, "'A B' is no name of a run"),
        (("query", "nobody", "SELECT 1"), FAILURE, "holds no run 'nobody'"),
        (("query", "demo", "SELECT nothing FROM rows"), MISTAKE, "nothing"),
        (("query", "demo", "SELECT * FROM episodes"), MISTAKE, "episodes"),
        (("query", "demo", "SELEC"), MISTAKE, "does not begin with SELECT or WITH"),
        (("query", "demo", "DROP TABLE rows"), MISTAKE, "does not begin with SELECT or WITH"),
        (("query", "demo", "SELECT 1; DROP TABLE rows"), MISTAKE, "more than one statement"),
        (("query", "demo", "SELECT * FROM read_csv('/etc/passwd')"), MISTAKE, "read_csv opens files"),
        (("query", "demo", "SELECT * FROM \"read_csv\"('/etc/passwd')"), MISTAKE, "read_csv opens files"),
        (("query", "demo", "SELECT * FROM read_csv/**/('/etc/passwd')"), MISTAKE, "read_csv opens files"),
        (("query", "demo", "SELECT ' /*', * FROM read_csv --'\n('/etc/passwd')"), MISTAKE, "read_csv opens files"),
        (("query", "demo", "SELECT (("), MISTAKE, "can't be run"),
    ],
)
def test_a_mistake_is_one_clear_error_and_changes_nothing(
    midflight: Run, tmp_path: Path, arguments: tuple[str, ...], expected: int, says: str
) -> None:
    store = tmp_path / "home" / "store"
    newest = store / "demo/manifests/00000002.json"
    newest.touch()
    before = _content(store)
    code, shown = midflight(*arguments)
    assert (code, says in " ".join(shown.split()), "Traceback" in shown) == (expected, True, False), shown
    assert _content(store) == before


def test_a_manifest_copied_from_another_run_is_named(midflight: Run, tmp_path: Path) -> None:
    manifests = tmp_path / "home" / "store" / "demo/manifests"
    midflight("fork", "demo", "2", "second")
    shutil.copy(manifests.parents[1] / "second/manifests/00000001.json", manifests / "00000003.json")
    for command in (("show", "demo", "3"), ("fork", "demo", "3", "third"), ("diff", "demo/2", "demo/3")):
        code, shown = midflight(*command)
        assert (code, "holds manifest 1 of run second; it was moved" in shown) == (FAILURE, True)
    assert "it was moved" in midflight("runs")[1].replace("\n", " ")
