"""All trainer ranks as one trainer, and what Ray's errors mean."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import ActorDiedError, ObjectLostError, RayActorError, RayTaskError

from gpu_workers.controller.ports import StepResult, WeightsRef
from storage.errors import ConfigurationError, InfrastructureFailure, MidflightError, RunAlreadyLive, TrainerLost

# An error of an actor's constructor comes back as text only, whose last line names it.
_REFUSAL = re.compile(r"^(?:storage\.errors\.)?(ConfigurationError|RunAlreadyLive): (.+)$", re.MULTILINE)
_REFUSALS: Mapping[str, type[MidflightError]] = {
    refusal.__name__: refusal for refusal in (ConfigurationError, RunAlreadyLive)
}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


class RayTrainer:
    """Trainer ranks behind one object: every call goes to all ranks, rank 0 answers.

    Any call raises `TrainerLost` once a rank is dead, after `on_lost` was told: no later call can succeed either.
    """

    def __init__(self, ranks: Sequence[Any], *, on_lost: Callable[[TrainerLost], None]) -> None:
        self._ranks = list(ranks)
        self._on_lost = on_lost

    async def begin_step(self, step: int) -> None:
        """Start the gradients of `step` on all ranks."""
        await self._call("begin_step", step)

    async def train_microbatch(self, rows: Sequence[pa.RecordBatch]) -> Mapping[str, float]:
        """One copy of the rows in the object store for all ranks; each takes its shard."""
        metrics: Mapping[str, float] = await self._call("train_microbatch", ray.put(list(rows)))
        return metrics

    async def flush_microbatches(self) -> None:
        """Compute what waits on every rank."""
        await self._call("flush_microbatches")

    async def finish_step(self, step: int) -> StepResult:
        """Apply the optimizer step on all ranks."""
        result: StepResult = await self._call("finish_step", step)
        return result

    async def publish_weights(self, version: int) -> WeightsRef:
        """Write weights where generators load them."""
        weights: WeightsRef = await self._call("publish_weights", version)
        return weights

    async def begin_save(self, prefix: str) -> None:
        """Copy the state on all ranks; each writes its share in a thread of its own."""
        await self._call("begin_save", prefix)

    async def finish_save(self, prefix: str) -> Sequence[Mapping[str, Any]]:
        """Entries of all ranks. They are asked now and then: a call that waits would keep a rank from training."""
        pause_s = _FIRST_PAUSE_S
        while True:
            replies = await self._all([rank.saved_files.remote(prefix) for rank in self._ranks], "save of the trainer")
            if None not in replies:
                return [entry for entries in replies for entry in entries]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def restore(self, files: Sequence[Mapping[str, Any]] | None) -> None:
        """Load a checkpoint, or the initial model."""
        await self._call("restore", files)

    async def _call(self, method: str, *arguments: Any) -> Any:
        calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return (await self._all(calls, f"{method} of the trainer"))[0]

    async def _all(self, references: Sequence[Any], what: str) -> list[Any]:
        try:
            return list(await asyncio.gather(*references))
        except ActorDiedError as error:
            told = str(error).partition("\n")[0]  # many lines on what may kill processes follow
            lost = TrainerLost(f"{what} failed: {told} Resume the run: it goes back to the newest snapshot")
            self._on_lost(lost)
            raise lost from error
        except (RayActorError, RayTaskError, ObjectLostError) as error:
            raise translate(error, what) from error


def translate(error: Exception, what: str) -> MidflightError:
    """The worker's own `MidflightError`, or an infrastructure failure that names what was called."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, MidflightError):
        return type(cause)(*cause.args)
    told = str(cause or error)
    if isinstance(error, RayActorError) and error.actor_init_failed:
        refused = _REFUSAL.findall(told)
        if refused:
            name, message = refused[-1]
            return _REFUSALS[name](message)
        told = f"its actor could not start: {told.strip().splitlines()[-1]}"
    elif isinstance(error, RayActorError):
        told = told.partition("\n")[0]  # many lines on what may kill processes follow
    return InfrastructureFailure(f"{what} failed: {told}; the worker's log has the details")
