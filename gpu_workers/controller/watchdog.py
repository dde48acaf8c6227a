"""The stall watchdog: reports, or ends, a run that does not get any further, also when nothing is in flight.

    watching --stall_timeout_s without progress--> stalled: trace event, log, metric; with `on_stall: end` an error
    stalled  --as long again-------------------->  reported again

Progress is what `counted_trace` says. Nobody expects any while the run waits for its driver: when it is parked, and
when no step was asked for and all that may be generated ahead of it has been.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_workers.controller.parts import RolloutParts
from storage.errors import RunStalled

_LOOKS_PER_TIMEOUT = 20
_LONGEST_PAUSE_S = 30.0

logger = logging.getLogger(__name__)


class Watchdog:
    """`run` looks now and then; `over_step` surrounds every train step that the driver asks for."""

    def __init__(self, parts: RolloutParts, *, running_groups: Callable[[], int], clock: Callable[[], float]) -> None:
        """`running_groups` counts the groups in flight; `clock` is that of the trace's counts."""
        self._parts = parts
        self._running_groups = running_groups
        self._clock = clock
        self._timeout_s = parts.config.async_rl.stall_timeout_s
        self._since = clock()
        self._step: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Look for ever; without a timeout there is nothing to look for."""
        if self._timeout_s is None:
            return
        self._since = self._clock()
        pause_s = min(self._timeout_s / _LOOKS_PER_TIMEOUT, _LONGEST_PAUSE_S)
        while True:
            await asyncio.sleep(pause_s)
            self.look()

    def look(self) -> None:
        """Report, or end, a run that is stalled now."""
        if self._timeout_s is not None and self._is_stalled(self._timeout_s):
            self._report(self._timeout_s)

    @contextmanager
    def over_step(self) -> Iterator[None]:
        """The driver waits for what the block does. Ending the run cancels it: a trainer that hangs wakes nobody."""
        self._step = step = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            failure = self._parts.state.failure
            if step is None or self._step is step or not isinstance(failure, RunStalled):
                raise
            step.uncancel()
            raise failure from None
        finally:
            self._step = None

    def _is_stalled(self, timeout_s: float) -> bool:
        now = self._clock()
        self._since = now if self._waits_for_driver() else max(self._since, self._parts.trace.progressed_at)
        return now - self._since >= timeout_s

    def _waits_for_driver(self) -> bool:
        state = self._parts.state
        return state.parked or state.failure is not None or (self._step is None and self._running_groups() == 0)

    def _report(self, timeout_s: float) -> None:
        parts, ends = self._parts, self._parts.config.async_rl.on_stall == "end"
        standing = {
            "train_steps": parts.state.train_steps,
            "step_asked_for": self._step is not None,
            "running_groups": self._running_groups(),
            "ledger_groups": len(parts.ledger),
            "buffered_groups": len(parts.buffer),
        }
        seconds = self._clock() - self._since
        stalled = RunStalled(
            f"no completion, group, train step or refit for {seconds:.0f} s (async_rl.stall_timeout_s {timeout_s:g}): "
            f"{', '.join(f'{name} {value}' for name, value in standing.items())}; see the logs of generators and "
            "trainers"
        )
        parts.trace.record("run_stalled", seconds=seconds, ends=ends, **standing)
        logger.warning("%s", stalled)
        self._since = self._clock()
        if not ends:
            return
        parts.state.fail(stalled)
        if self._step is not None:
            step, self._step = self._step, None
            step.cancel()
