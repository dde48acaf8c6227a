"""Environments are found by name, by entry point and by import path; what is none is refused by its name."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_workers.environments.games.guess_letter import GuessLetter
from gpu_workers.environments.registry import environment_names, find_environment
from storage.errors import ConfigurationError

MODULE = '''"""An installed package."""
from gpu_workers.environments.interface import Environment, Step

class Echo(Environment):
    name = "echo"
    def reset(self, task, rng):
        return Step({}, "say")
    def step(self, state, action, rng):
        return Step({}, action)

class Nameless(Echo):
    name = ""

class Half(Environment):
    name = "half"

not_a_class = 3
'''


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Puts a package with the given entry points on the path for one test."""
    (tmp_path / "foreign_games.py").write_text(MODULE)

    def install(points: str) -> None:
        info = tmp_path / "foreign_games-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-games\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[midflight.environments]\n{points}\n")

    sys.path.insert(0, str(tmp_path))
    yield install
    sys.path.remove(str(tmp_path))
    sys.modules.pop("foreign_games", None)


def test_the_built_in_environments_are_found_under_their_own_names():
    assert environment_names() == ["frozen_lake", "guess15x4", "running_sum", "textarena_guess"]
    assert [find_environment(name).name for name in environment_names()] == environment_names()


def test_an_import_path_is_found():
    path = f"{GuessLetter.__module__}:GuessLetter"
    assert isinstance(find_environment(path), GuessLetter)


def test_an_entry_point_gives_a_package_s_environment_a_name(installed: Callable[[str], None]):
    installed("echo = foreign_games:Echo")
    assert "echo" in environment_names()
    assert find_environment("echo").name == "echo"


@pytest.mark.parametrize(
    ("points", "name", "message"),
    [
        (
            "guess15x4 = foreign_games:Echo",
            "guess15x4",
            r"registered twice, .*of package 'foreign-games'",
        ),
        ("repeat = foreign_games:Echo", "repeat", r"calls itself 'echo', but is registered as 'repeat'"),
    ],
)
def test_an_entry_point_that_names_something_else_is_refused(
    installed: Callable[[str], None], points: str, name: str, message: str
):
    installed(points)
    with pytest.raises(ConfigurationError, match=message):
        find_environment(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chess", r"environment 'chess' is not registered; use one of \['frozen_lake', 'guess15x4'"),
        ("no_such_module:Game", r"'no_such_module:Game' can't be imported: ModuleNotFoundError.*'guess15x4'"),
        ("foreign_games:Missing", r"can't be imported: AttributeError.*'guess15x4'"),
        ("foreign_games:not_a_class", r"'foreign_games:not_a_class' is 3, not a subclass .*'guess15x4'"),
        ("foreign_games:Nameless", r"'foreign_games:Nameless' has name = ''; give the class a 'name'"),
        ("foreign_games:Half", r"'foreign_games:Half' lacks \['reset', 'step'\]"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_is_no_environment_is_refused_by_its_name(name: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        find_environment(name)
