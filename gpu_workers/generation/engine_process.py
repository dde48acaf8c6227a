"""Starts the engine's process in half the time: it forks from a server that imports vLLM while the actor does too.

vLLM spawns the engine inside Ray actors, so that everything is imported twice, one after the other (15 to 18 s). It
must not fork from the actor itself: the child would inherit the actor's sockets, Ray would not notice that the actor
died, and the engine would outlive it. Python's fork server is a clean process that can import in parallel (9 s).
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, context, forkserver
from typing import Any

_PRELOADED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen2",
    "gpu_workers.generation.counter_sampler",
    "gpu_workers.generation.refit_extension",
]


class EngineProcess(context.ForkServerProcess):
    """The engine's process: has the environment that its starter had, and dies when its starter does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        """In the child: take over the environment, watch the starter, run the engine."""
        os.environ.update(self._environment)
        threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()
        super().run()


class _EngineContext(context.ForkServerContext):
    """A multiprocessing context whose processes are `EngineProcess`es."""

    Process = EngineProcess


def start_importing() -> None:
    """Start the fork server; it imports vLLM from now on. The environment must be complete."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


@contextmanager
def forked_engines() -> Iterator[None]:
    """Within this block, vLLM takes its engine's process from the fork server.

    It also looks at the model's class in this process instead of starting one more (10 s on a new machine).
    """
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils

    originals = utils.get_mp_context, registry._run_in_subprocess
    utils.get_mp_context = _EngineContext
    registry._run_in_subprocess = _call
    try:
        yield
    finally:
        utils.get_mp_context, registry._run_in_subprocess = originals


def _call(function: Callable[[], Any]) -> Any:
    return function()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)
