"""The table of `midflight chaos`: one line for each scenario, and of a violation the command that repeats it."""

from dataclasses import replace

import pytest
from rich.console import Console

from flows.chaos.judgement import RESUMED, VIOLATION, Result
from flows.chaos.scenario import Kind, scenario, scenarios
from flows.chaos.table import chaos_table, progress_line, repeat_command, violations

GOOD = Result(Kind.KILL_ENGINE, 3, "kill engine after train_step 2", RESUMED, 1234, 12.34, 2, 40.0, ())
BAD = replace(GOOD, kind=Kind.TORN_FILE, seed=17, outcome=VIOLATION, problems=("2 prompts skipped: a, b",))


@pytest.fixture
def shown():
    def show(*things):
        console = Console(width=200, record=True, file=None, quiet=False)
        with console.capture() as captured:
            for thing in things:
                console.print(thing)
        return captured.get()

    return show


def test_a_line_says_what_happened_and_what_it_cost(shown):
    lines = shown(chaos_table([GOOD])).splitlines()
    (place,) = [number for number, line in enumerate(lines) if "kill-engine" in line]
    assert lines[place].split() == ["kill-engine", "3", "resumed", "1,234", "12.3", "40"]
    assert lines[place + 1].strip() == "kill engine after train_step 2"


def test_a_scenario_without_a_moment_of_recovery_has_none(shown):
    assert "None" not in shown(chaos_table([replace(GOOD, recover_s=None)]))


def test_a_violation_is_told_with_its_problems_and_its_command(shown):
    text = shown(*violations([GOOD, BAD]))
    assert "midflight chaos --kind torn-file --seed 17 --count 1" in text
    assert "2 prompts skipped: a, b" in text
    assert "kill-engine" not in text


def test_the_command_of_a_line_plays_that_scenario():
    words = repeat_command(BAD).split()
    kind, seed = Kind(words[words.index("--kind") + 1]), int(words[words.index("--seed") + 1])
    assert scenarios(seed, 1, [kind]) == [scenario(BAD.kind, BAD.seed)]


def test_progress_tells_number_outcome_and_fault():
    assert progress_line(BAD, 2, 20) == "2/20 torn-file 17: VIOLATION (40 s, 2 starts): kill engine after train_step 2"
