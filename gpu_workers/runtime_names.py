"""Where a run's actors and weights are found: names, namespaces and folders, in one place."""

import fcntl
import hashlib
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ray

CONTROLLER = "controller"
LAUNCH_LOCK = "launch-lock"
CONTROLLER_ANSWERS_S = 20.0  # a living controller's event loop does, even while it starts
_HELD = "held"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory is the point: engines map the file


def namespace_of(run: str) -> str:
    """The Ray namespace of a run."""
    return f"midflight-{run}"


def actors_of(run: str) -> dict[str, Any]:
    """Handles of all living named actors of a run, by name; the launch lock is none of them."""
    namespace = namespace_of(run)
    named = ray.util.list_named_actors(all_namespaces=True)
    actors = {}
    for name in (entry["name"] for entry in named if entry["namespace"] == namespace):
        if name == LAUNCH_LOCK:
            continue
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
    """The folder through which a run's trainer hands weights to its generators on one node: one below for each
    incarnation, since two may live there for a while, in two clusters.
    """
    return _SHARED_MEMORY / f"midflight-{run}-{hashlib.sha256(store_url.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The weights of one incarnation, which stay as long as a process holds them."""

    folder: Path
    lock: IO[bytes]

    def release(self) -> None:
        """This process needs them no longer."""
        self.lock.close()


def hold_weights(folder: Path) -> HeldWeights:
    """Keep the folder of one incarnation from being cleared away, until `release` or the end of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / _HELD).open("ab")
    fcntl.flock(lock, fcntl.LOCK_SH)
    return HeldWeights(folder, lock)


def remove_weights(held: HeldWeights) -> None:
    """Remove the weights of an incarnation that ends."""
    held.release()
    shutil.rmtree(held.folder, ignore_errors=True)
    with suppress(OSError):  # another incarnation's are there
        held.folder.parent.rmdir()


def remove_dead_weights(weights: Path) -> None:
    """Remove the weights that killed incarnations of a run left behind."""
    for folder in weights.iterdir() if weights.exists() else ():
        if folder.is_dir() and not _is_held(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    try:
        with (folder / _HELD).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is being removed
        return False
    return False
