"""Flow runs of `train` without a worker: each in a process of its own, forked from one that has imported everything.

A worker's polling, a Python that starts for each flow run, and the child flow run of each restore cost time and are
none of a scenario's business. What runs is the flow itself, against the same Prefect server.
"""

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Coroutine
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, cast

from storage.run_config import RunConfig

COMPLETED, FAILED, CRASHED = 0, 1, 75
_PRELOADED = ["flows.train", "gpu_workers.launch", "gpu_workers.models.tiny"]


class Drivers:
    """Starts flow runs. The environment must lead to the services before the first one is started."""

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def start(self, config: RunConfig, log: Path) -> ForkServerProcess:
        """A `train` flow run of this configuration. Its exit code: 0, it trained to the end; 75, it crashed, which a
        new start can mend; 1, it failed. What it says is appended to `log`.
        """
        process = self._context.Process(target=_drive, args=(config.model_dump_json(), str(log)), name=config.name)
        process.start()
        return process


def _drive(config: str, log: str) -> None:
    """In the forked process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    from flows.train import train

    run = cast(Coroutine[Any, Any, Any], train(RunConfig.model_validate_json(config), return_state=True))
    ended = asyncio.run(run)
    sys.stdout.write(f"{ended.name}: {ended.message}\n")
    sys.stdout.flush()
    sys.exit(COMPLETED if ended.is_completed() else CRASHED if ended.is_crashed() else FAILED)
