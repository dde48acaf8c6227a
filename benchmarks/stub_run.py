"""A `train` flow whose steps only wait: `python -m benchmarks.stub_run STORE WAY STEPS STEP_S INTERVAL_S EVERY`.

The flow is the real one from `drive` on: tasks, artifacts, snapshot attempts. Its runtime is made up: a step sleeps, an
attempt answers at once. WAY is `prefect`, or `bare`, which awaits the same calls without Prefect. After each `EVERY`
steps one JSON line says how many are done, at what time and with how much processor time and memory of this process.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil
from prefect import flow

from flows.train import drive
from storage.identity import identity
from storage.run_config import RunConfig
from tasks import reports, training
from tasks.runtime import RuntimeStatus
from tasks.snapshots import attempt_number

STEP_S = 2.0
METRICS = ("loss", "clip_fraction", "gradient_norm", "entropy", "kl", "learning_rate", "tokens", "ratio_max")


class WaitingRuntime:
    """A `tasks.runtime.Runtime` whose steps take a set time and nothing else."""

    def __init__(self, config: RunConfig, *, step_s: float, every: int) -> None:
        self._config = config
        self._step_s = step_s
        self._every = every
        self._state: str | None = None
        self._driver: str | None = None
        self._committed = 0
        self._random = random.Random(1)
        self._process = psutil.Process()

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._config.name

    async def status(self) -> RuntimeStatus | None:
        """As a controller would describe itself."""
        if self._state is None:
            return None
        steps, fingerprint = self._committed, identity(self._config).fingerprint
        return RuntimeStatus(
            self.run,
            incarnation="stub",
            state=self._state,
            train_steps=steps,
            trainer_version=steps,
            max_steps=self.max_steps,
            driver=self._driver,
            config_fingerprint=fingerprint,
        )

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self._config.algorithm.max_steps

    async def launch(self, config: RunConfig, incarnation: str, *, take_over: bool = False) -> None:
        """Nothing has to start."""
        self._state = "empty"

    async def end(self, incarnation: str) -> None:
        """Nothing has to end."""
        self._state = None

    async def attach(self, driver: str, *, take_over: bool = False) -> None:
        """The only driver there is."""
        self._driver = driver

    async def detach(self, driver: str) -> None:
        """Nobody drives it any more."""
        self._driver = None

    async def heartbeat(self, driver: str) -> None:
        """Nobody watches the driver."""

    async def read_logs(self) -> Mapping[str, Any]:
        """Nothing is logged."""
        return {"records": [], "lost": 0}

    async def restore_link(self, link: str, plan: Mapping[str, Any], incarnation: str) -> dict[str, Any]:
        """The last link lets it run."""
        self._state = "running"
        return {}

    async def train_steps(self, first: int, last: int, incarnation: str) -> list[dict[str, Any]]:
        """Wait for each step; reports as large as real ones."""
        reports = []
        for step in range(first, last + 1):
            await asyncio.sleep(self._step_s)
            self._committed = step
            reports.append(self._report(step))
            if step % self._every == 0 or step == 1:
                self._tell(step)
        return reports

    async def attempt_snapshot(self, number: int, *, force: bool, incarnation: str) -> dict[str, Any]:
        """Completed at once."""
        return {"outcome": "completed", "number": number, "sequence": number}

    async def checkpoint(self, *, incarnation: str) -> dict[str, Any]:
        """Completed at once."""
        return {"outcome": "completed", "step": self._committed, "sequence": 1}

    async def close(self, *, snapshot: bool) -> dict[str, Any]:
        """Nothing is unfinished."""
        status = await self.status()
        return {"incarnation": "" if status is None else status.incarnation}

    async def preempt(self, reason: str) -> None:
        """Nothing is unfinished."""
        self._state = None

    def _report(self, step: int) -> dict[str, Any]:
        metrics = {name: self._random.random() for name in METRICS}
        mean = 1 - 0.99**step + self._random.random() / 10
        facts = {"rewards_mean": mean, "batch_age": 1.0, "seconds": self._step_s, "durable_step": step}
        return {"step": step, **facts, "groups": 16, "rows": 128, "metrics": metrics}

    def _tell(self, step: int) -> None:
        usage, memory = self._process.cpu_times(), self._process.memory_full_info()
        line = {"step": step, "t": time.time(), "cpu_s": usage.user + usage.system, "mib": memory.uss / 2**20}
        print(json.dumps(line), flush=True)


async def run_with_prefect(config: RunConfig, runtime: WaitingRuntime) -> None:
    """As the deployment does it, restore apart."""

    async def restore_run(status: RuntimeStatus) -> None:
        await runtime.restore_link("redispatch", {}, status.incarnation)

    async def nobody_is_gone(_driver: str) -> bool:
        return False

    @flow(name="train", flow_run_name=f"train-{config.name}", persist_result=False)
    async def train() -> dict[str, Any]:
        return await drive(config, runtime, driver="benchmark", restore_run=restore_run, owner_is_gone=nobody_is_gone)

    await train()


async def run_bare(config: RunConfig, runtime: WaitingRuntime) -> None:
    """The same calls of the runtime."""

    async def snapshots() -> None:
        while True:
            await asyncio.sleep(config.rollout_checkpointing.interval_s)
            await runtime.attempt_snapshot(attempt_number(), force=False, incarnation="stub")

    attempts = asyncio.create_task(snapshots())
    for step in range(1, runtime.max_steps + 1):
        await runtime.train_steps(step, step, "stub")
    attempts.cancel()


def main() -> None:
    """Run it to its end."""
    store, way, steps, step_s, interval_s, every = sys.argv[1:]
    config = RunConfig.model_validate(
        {
            "name": "stub",
            "algorithm": {"max_steps": int(steps)},
            "rollout_checkpointing": {"interval_s": float(interval_s)},
            "store": {"url": store},
        }
    )
    # Steps that run faster than real ones are still worth a task run each, as those would be; artifacts come as often.
    speed_up = STEP_S / float(step_s)
    training.STEP_WORTH_A_TASK_S /= speed_up
    reports.REFRESH_S /= speed_up
    runtime = WaitingRuntime(config, step_s=float(step_s), every=int(every))
    asyncio.run((run_with_prefect if way == "prefect" else run_bare)(config, runtime))


if __name__ == "__main__":
    main()
