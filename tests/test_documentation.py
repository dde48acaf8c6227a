"""What the pages say about configuration is what the code declares."""

import re
from pathlib import Path

import pytest

from flows.chaos.scenario import Kind
from flows.config_files import known_keys, load_config
from flows.config_reference import config_reference, filled, key_table
from flows.event_reference import filled_events
from storage.errors import ConfigurationError
from storage.fault_points import POINTS
from storage.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_configuration_reference_is_the_one_in_the_code() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == config_reference(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_keys_in_a_page_are_those_in_the_code(page: Path) -> None:
    assert page.read_text() == filled(page.read_text()), "run `make docs`"


def test_the_tables_of_events_are_those_of_the_schema() -> None:
    page = (ROOT / "docs/trace-and-report.md").read_text()
    assert "| `train_step` |" in page
    assert page == filled_events(page), "run `make docs`"


def test_the_page_on_algorithms_has_every_key_of_the_section() -> None:
    page = (ROOT / "docs/algorithms.md").read_text()
    keys = [key for key in known_keys() if key.startswith("algorithm.") and key != "algorithm.critic"]
    assert [key for key in keys if f"| `{key}` |" not in page] == []


def test_a_table_is_made_from_single_keys_and_whole_sections() -> None:
    page = "before\n<!-- keys: seed store.* -->\n(stale)\n<!-- end keys -->\nafter\n"
    made = filled(page)
    assert made.startswith("before\n")
    assert made.endswith("after\n")
    assert "stale" not in made
    assert [line.split("`")[1] for line in made.splitlines() if line.startswith("| `")] == [
        "seed",
        "store.url",
        "store.deadline_s",
    ]
    assert filled(made) == made


def test_a_page_that_names_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"algorithm\.speed"):
        key_table(["algorithm.speed"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_configuration(path: Path) -> None:
    assert isinstance(load_config(path), RunConfig)


def test_the_page_on_chaos_has_every_kind_and_every_point() -> None:
    page = (ROOT / "docs/chaos.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z:-]+)` \| (.*) \|$", page, flags=re.MULTILINE))
    assert rows.keys() == {*Kind, *POINTS}
    assert {point: rows[point] for point in POINTS} == POINTS
