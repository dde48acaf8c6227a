"""`midflight report`: for people, for machines, and as a page; it reads the store and changes nothing."""

import json
from collections.abc import Callable
from pathlib import Path

from flows.cli import FAILURE, MISTAKE

Run = Callable[..., tuple[int, str, str]]


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_reported_as_tables_as_a_page_and_as_json_and_stays_as_it_is(midflight: Run, tmp_path: Path) -> None:
    before = _content(tmp_path / "home")
    code, shown, error = midflight("report", "demo", "--html", str(tmp_path / "new" / "report.html"))
    assert (code, error) == (0, "")
    for title in ("Summary", "Staleness of trained tokens", "Where the time of a group went", "Exactly-once audit"):
        assert title in shown
    assert "Midflight report: demo" in (tmp_path / "new" / "report.html").read_text()
    code, machine, _ = midflight("report", "demo", "--json")
    found = json.loads(machine)
    assert (code, found["run"], found["problems"], found["stops"]) == (0, "demo", [], [])
    assert [(step["step"], step["batch_age"]) for step in found["steps"]] == [
        (step["step"], step["recorded_batch_age"]) for step in found["steps"]
    ]
    assert _content(tmp_path / "home") == before


def test_a_run_is_compared_with_others_but_not_with_itself(midflight: Run) -> None:
    assert midflight("fork", "demo", "2", "second")[0] == 0
    code, machine, _ = midflight("report", "demo", "--against", "second", "--json")
    found = json.loads(machine)
    assert (code, found["against"], found["lost_progress"]) == (0, ["second"], [])
    code, _, error = midflight("report", "demo", "--against", "demo")
    assert (code, "is compared with itself" in error) == (MISTAKE, True)
    code, _, error = midflight("report", "demo", "--against", "nobody")
    assert (code, "nobody" in error) == (FAILURE, True)
    assert midflight("report", "nobody")[0] == FAILURE


def test_a_broken_promise_is_reported_and_then_an_error(midflight: Run, tmp_path: Path) -> None:
    trace = tmp_path / "home/store/demo/trace/incarnation-1.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    step = next(line for line in lines if '"train_step"' in line)
    trace.write_text("".join([*lines, step]))
    code, shown, error = midflight("report", "demo", "--html", str(tmp_path / "report.html"))
    assert (code, "Exactly-once audit" in shown, "trained twice" in error) == (FAILURE, True, True)
    assert 'class="problem"' in (tmp_path / "report.html").read_text()


def test_a_page_that_can_t_be_written_is_a_mistake_and_leaves_nothing(midflight: Run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "folder", tmp_path / "file" / "report.html"):
        code, _, error = midflight("report", "demo", "--html", str(path))
        assert code == MISTAKE
        assert "which can't be written" in error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder", "home"]
