"""Trains a run whose train-step task fails at each side of the commit window: `faulty_run.py HOME CONFIG OUT`.

The flow's own loops, tasks and restore on real services; only the trainer's actor and the runtime lose a call each:

    before the window   a microbatch of step 2 fails after another chunk was accumulated
    after the window    publishing the weights of step 4 fails when the step is committed
    after the reply     a reply with steps that are all committed never arrives

Writes to OUT which steps were asked for each time, and the reports that were lost and given again.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from flows.home import HOME_VARIABLE, Home
from flows.service_state import read_state

os.environ[HOME_VARIABLE] = sys.argv[1]
HOME = Home.current()
SERVICES = read_state(HOME)
assert SERVICES is not None
os.environ.update(SERVICES.environment(HOME))  # Prefect reads its settings when it is imported

from prefect import flow  # noqa: E402

import gpu_workers.launch as launch  # noqa: E402
from flows.config_files import validated  # noqa: E402
from flows.driver import Driver, owner_is_gone  # noqa: E402
from flows.restore import restore  # noqa: E402
from flows.train import drive  # noqa: E402
from gpu_workers.training.trainer_actor import TrainerActor  # noqa: E402
from storage.errors import InfrastructureFailure  # noqa: E402
from tasks.ray_runtime import RayRuntime  # noqa: E402

FAILS_BEFORE, FAILS_AFTER = 2, 4


class FaultyTrainer(TrainerActor):
    """Fails twice, once at each side of a window."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calls_of_step = 0
        self._faults = {"before", "after"}

    def train_microbatch(self, rows: Any) -> dict[str, float]:
        taken = super().train_microbatch(rows)
        self._calls_of_step += self._sequence.last.step == FAILS_BEFORE - 1
        if self._calls_of_step == 2 and "before" in self._faults:
            self._faults.remove("before")
            raise InfrastructureFailure("injected: lost before the window")
        return taken

    def publish_weights(self, version: int) -> Any:
        if version == FAILS_AFTER and "after" in self._faults:
            self._faults.remove("after")
            raise InfrastructureFailure("injected: lost after the window")
        return super().publish_weights(version)


class FaultyRuntime(RayRuntime):
    """Loses the first reply that goes beyond the faults of the trainer."""

    def __init__(self, run: str) -> None:
        super().__init__(run, cache=HOME.cache)
        self.asked: list[tuple[int, int]] = []
        self.errors: list[str] = []
        self.lost: list[dict[str, Any]] = []
        self.again: list[dict[str, Any]] = []

    async def train_steps(self, first: int, last: int, incarnation: str) -> list[dict[str, Any]]:
        self.asked.append((first, last))
        try:
            reports = await super().train_steps(first, last, incarnation)
        except InfrastructureFailure as error:
            self.errors.append(str(error))
            raise
        if last > FAILS_AFTER and not self.lost:
            self.lost = reports
            self.errors.append("injected: the reply was lost")
            raise InfrastructureFailure(self.errors[-1])
        if self.lost and not self.again:
            self.again = reports
        return reports


@flow(name="train-under-faults", persist_result=False)
async def train_under_faults(values: dict[str, Any]) -> dict[str, Any]:
    """What the `train` flow does, on a faulty runtime."""
    config, driver = validated(values, origin="the test"), str(Driver.this_flow_run())
    runtime = FaultyRuntime(config.name)

    async def restore_run(_status: Any) -> None:
        await restore(config, driver)

    summary = await drive(config, runtime, driver=driver, restore_run=restore_run, owner_is_gone=owner_is_gone)
    noted = {"asked": runtime.asked, "errors": runtime.errors, "lost": runtime.lost, "again": runtime.again}
    return {"steps": summary["steps"], **noted}


if __name__ == "__main__":
    launch.TrainerActor = FaultyTrainer  # type: ignore[misc]
    told = asyncio.run(train_under_faults(json.loads(Path(sys.argv[2]).read_text())))
    Path(sys.argv[3]).write_text(json.dumps(told))
