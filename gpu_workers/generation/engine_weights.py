"""Which weights an engine runs with, and how they are exchanged while calls are running.

running --load--> paused --(weights loaded)--> running
                  paused --(failed)----------> paused, until a later load succeeds
"""

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

from gpu_workers.controller.ports import WeightsRef
from storage.errors import InfrastructureFailure


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A version with the file it came from, so that a replaced file of the same name is not taken for it."""

    ref: WeightsRef
    file: tuple[int, ...]


class EngineWeights:
    """Owner of the engine's weights. Loads are serialized; the version in use is that of the last success."""

    def __init__(self, llm: Any, name: str) -> None:
        """`llm` is vLLM's AsyncLLM, `name` is how errors call the generator."""
        self._llm = llm
        self._name = name
        self._lock = asyncio.Lock()
        self._loaded: _Loaded | None = None

    @property
    def version(self) -> int | None:
        """Version of the last successful load; None before it and after a failed one."""
        return self._loaded.ref.version if self._loaded else None

    async def load(self, ref: WeightsRef) -> dict[str, float]:
        """Load a safetensors file. Running calls stay; their later tokens carry `ref.version`.

        Returns seconds (`pause_s`, `load_s`, `resume_s`) and `bytes`; all are 0 when the engine already runs with
        this version from this very file. Raises InfrastructureFailure; the engine then stays paused.
        """
        async with self._lock:
            try:
                return await self._load(ref)
            except Exception as error:
                self._loaded = None
                raise InfrastructureFailure(self._advice(ref, error)) from error

    async def _load(self, ref: WeightsRef) -> dict[str, float]:
        if self._loaded is not None and self._loaded == _Loaded(ref, _file_identity(ref.location)):
            return {"pause_s": 0.0, "load_s": 0.0, "resume_s": 0.0, "bytes": 0.0}
        self._loaded = None
        started = time.perf_counter()
        # The cache is cleared so that later tokens see keys and values of the new weights only.
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        paused = time.perf_counter()
        wanted = _Loaded(ref, _file_identity(ref.location))
        sizes = await self._llm.collective_rpc("refit", args=(ref.location,))
        await self._llm.update_weight_version(str(ref.version))
        loaded = time.perf_counter()
        await self._llm.resume_generation()
        self._loaded = wanted
        return {
            "pause_s": paused - started,
            "load_s": loaded - paused,
            "resume_s": time.perf_counter() - loaded,
            "bytes": float(sum(sizes)),
        }

    def _advice(self, ref: WeightsRef, error: Exception) -> str:
        what = f"{self._name} could not load weights version {ref.version} from {ref.location}: {error!r}"
        if self._llm.errored:
            return f"{what}; its engine is dead: start the generator again"
        return f"{what}; its engine is paused: load weights that fit, or start the generator again"


def _file_identity(location: str) -> tuple[int, ...]:
    """Changes whenever the file is replaced or written."""
    stat = os.stat(location)
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
