"""One flow at a time starts or ends the actors of a run in a Ray cluster.

The lock is an actor's name: Ray gives it to one caller only, and takes it back when the process that asked for it dies.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from gpu_workers.runtime_names import LAUNCH_LOCK, namespace_of
from storage.errors import RunAlreadyLive

# A holder that died a moment ago is noticed within this time, and a short one has ended.
PATIENCE_S = 10.0
_POLL_S = 0.1
_ANSWER_S = 10.0


class _Holder:
    """The actor: knows who holds the lock."""

    def __init__(self, who: str) -> None:
        self._who = who

    def who(self) -> str:
        """Who asked for it."""
        return self._who


@contextmanager
def launch_lock(run: str, who: str, *, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the lock of a run while the block runs. Raises RunAlreadyLive, naming the holder, when it stays taken."""
    lock = _acquire(run, who, deadline=time.monotonic() + patience_s)
    try:
        yield
    finally:
        ray.kill(lock, no_restart=True)


def _acquire(run: str, who: str, *, deadline: float) -> Any:
    holder: Any = ray.remote(_Holder)
    options = {"name": LAUNCH_LOCK, "namespace": namespace_of(run), "num_cpus": 0}
    while True:
        try:
            return holder.options(**options).remote(who)
        except ValueError as taken:  # Ray's "name is already taken"
            if time.monotonic() > deadline:
                raise RunAlreadyLive(
                    f"run '{run}' is being started or ended by {_holder_of(run)}: wait until that is done, then try "
                    "again if it is still needed"
                ) from taken
            time.sleep(_POLL_S)


def _holder_of(run: str) -> str:
    try:
        lock = ray.get_actor(LAUNCH_LOCK, namespace=namespace_of(run))
        return str(ray.get(lock.who.remote(), timeout=_ANSWER_S))
    except (ValueError, RayError):
        return "another flow run"
