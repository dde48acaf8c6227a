"""Where a run's actors and weights are found: names, namespaces and folders, in one place."""

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

CONTROLLER = "controller"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory is the point: engines map the file


def namespace_of(run: str) -> str:
    """The Ray namespace of a run."""
    return f"midflight-{run}"


def actors_of(run: str) -> dict[str, Any]:
    """Handles of all living named actors of a run, by name."""
    namespace = namespace_of(run)
    named = ray.util.list_named_actors(all_namespaces=True)
    actors = {}
    for name in (entry["name"] for entry in named if entry["namespace"] == namespace):
        with suppress(ValueError):  # it ended after it was listed
            actors[name] = ray.get_actor(name, namespace=namespace)
    return actors


def named(run: str, name: str) -> dict[str, Any]:
    """Ray's options of a detached actor that is found by its name."""
    return {"name": name, "namespace": namespace_of(run), "lifetime": "detached"}


def end_workers(run: str, *, controller_last: bool) -> None:
    """Kill every actor of a run: the controller first, since it starts generators again, unless it is the caller."""
    actors = actors_of(run)
    for name in sorted(actors, key=lambda name: (name == CONTROLLER) is controller_last):
        ray.kill(actors[name], no_restart=True)


def weights_dir(run: str, store_url: str) -> Path:
    """The folder through which a run's trainer hands weights to its generators on one node."""
    return _SHARED_MEMORY / f"midflight-{run}-{hashlib.sha256(store_url.encode()).hexdigest()[:8]}"


def remove_weights(folder: Path) -> None:
    """Remove a run's weights, also those that killed incarnations left behind."""
    if folder.exists():
        shutil.rmtree(folder)
