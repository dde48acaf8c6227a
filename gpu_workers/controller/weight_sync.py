"""Refit: gives the generators the trainer's current weights, once per version."""

import time

from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import Generator, Trainer
from storage.fault_points import reached


class WeightSync:
    """Running calls go on across a refit; dispatch is gated on the version the generators really hold."""

    def __init__(self, parts: RolloutParts, trainer: Trainer, generator: Generator) -> None:
        self._parts = parts
        self._trainer = trainer
        self._generator = generator
        self._synced: int | None = None

    async def ensure(self, version: int) -> None:
        """Refit unless the generators hold `version` already."""
        if self._synced == version:
            return
        started = time.perf_counter()
        weights = await self._trainer.publish_weights(version)
        reached("weights:published", self._parts.config.name)
        timings = await self._generator.load_weights(weights)
        self._synced = version
        self._parts.state.generator_version = version
        seconds = time.perf_counter() - started
        self._parts.trace.record("weight_sync", version=version, seconds=seconds, timings=dict(timings))
        self._parts.state.changed.notify()

    def forget(self) -> None:
        """The trainer's weights were replaced (a restore): the next `ensure` refits whatever the version."""
        self._synced = None
