"""SIGTERM as a preemption notice for an asynchronous Ray actor: it gets time to leave; a second one ends it at once.

Python runs signal handlers in the main thread only, where Ray runs its loop and installs its own handler, while an
asynchronous actor lives in another thread. Ray's set-up hook runs in the main thread, but too early. So the hook makes
SIGUSR1 the request to take SIGTERM over, and the actor sends it to its own process when it is made.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

_listeners: list[Callable[[], object]] = []
_earlier: Any = signal.SIG_DFL


def preemption_env() -> dict[str, str]:
    """Environment of an actor that calls `on_preemption`."""
    return {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: f"{__name__}.install"}


def install() -> None:
    """Ray's set-up hook of the worker process."""
    signal.signal(signal.SIGUSR1, _take_over)


def on_preemption(listener: Callable[[], object]) -> None:
    """The process's first SIGTERM calls `listener` on the running event loop; the next one ends the process.

    Ray's main thread looks at signals once the actor's constructor has returned. Without effect in a process that was
    not started with `preemption_env`.
    """
    if signal.getsignal(signal.SIGUSR1) is not _take_over:
        return
    loop = asyncio.get_running_loop()
    _listeners.append(lambda: loop.call_soon_threadsafe(listener))
    os.kill(os.getpid(), signal.SIGUSR1)


def _take_over(*_: object) -> None:
    global _earlier  # noqa: PLW0603 -- a process has one handler
    _earlier = signal.signal(signal.SIGTERM, _notice)


def _notice(*_: object) -> None:
    signal.signal(signal.SIGTERM, _earlier)
    for listener in _listeners:
        listener()
