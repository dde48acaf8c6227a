"""Environments by name: the built-in ones, those of installed packages, and import paths.

A package offers an environment with an entry point of the group `midflight.environments`.
"""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from gpu_workers.environments.interface import Environment
from storage.errors import ConfigurationError

GROUP = "midflight.environments"

_GAMES = "gpu_workers.environments.games"
_BUILT_IN = {
    "frozen_lake": f"{_GAMES}.frozen_lake:FrozenLake",
    "guess15x4": f"{_GAMES}.guess_letter:GuessLetter",
    "running_sum": f"{_GAMES}.running_sum:RunningSum",
    "textarena_guess": f"{_GAMES}.textarena_replay:GuessTheNumber",
}


def environment_names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_registered())


def find_environment(name: str) -> Environment:
    """A new instance of the environment `name`: a registered name, or `package.module:Class`.

    Raises ConfigurationError, which names the value and lists the known names.
    """
    registered = _registered()
    if name in registered:
        return _instance(registered[name], registered=name)
    if ":" not in name:
        raise ConfigurationError(
            f"environment {name!r} is not registered; use one of {sorted(registered)}, an entry point of the group "
            f"'{GROUP}', or 'package.module:Class'"
        )
    return _instance(name, registered=None)


def registered_environment(name: str) -> Environment:
    """A new instance of a registered environment: for names from the network, which never import anything else.

    Raises ConfigurationError for every other name, an import path included.
    """
    if name not in _registered():
        raise ConfigurationError(f"environment {name!r} is not registered; use one of {environment_names()}")
    return find_environment(name)


def _registered() -> dict[str, str]:
    """Import paths by name."""
    found = dict(_BUILT_IN)
    for point in entry_points(group=GROUP):
        if found.get(point.name, point.value) != point.value:
            raise ConfigurationError(
                f"environment {point.name!r} is registered twice, as {found[point.name]!r} and as {point.value!r}"
                f"{_offered_by(point)}; rename one"
            )
        found[point.name] = point.value
    return found


def _offered_by(point: EntryPoint) -> str:
    return f" of package {point.dist.name!r}" if point.dist else ""


def _instance(path: str, *, registered: str | None) -> Environment:
    kind = _load(path)
    known = environment_names()
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigurationError(
            f"environment {path!r} is {kind!r}, not a subclass of gpu_workers.environments.interface.Environment; "
            f"known ones are {known}"
        )
    name: object = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"environment {path!r} has name = {name!r}; give the class a 'name', by which snapshots call it; "
            f"known ones are {known}"
        )
    if registered is not None and name != registered:
        raise ConfigurationError(
            f"environment {path!r} calls itself {name!r}, but is registered as {registered!r}; make the two equal"
        )
    if missing := sorted(kind.__abstractmethods__):
        raise ConfigurationError(f"environment {path!r} lacks {missing}; known ones are {known}")
    return kind()


def _load(path: str) -> object:
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        raise ConfigurationError(
            f"environment {path!r} can't be imported: {type(error).__name__}: {error}; give 'package.module:Class', "
            f"or one of {environment_names()}"
        ) from error
