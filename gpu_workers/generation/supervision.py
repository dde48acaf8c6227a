"""All generators of a run behind one object: groups go to living ones, dead ones are started again.

    live --died--> down --start, load the current weights--> live
                   down --died or failed too often in a row--> lost

A generator is dead when its actor is, or its engine's process. Who notices is a group that ran there, or a refit: they
ask once whether it still lives. Its groups fail at once as `WorkerDied`; they run elsewhere, or wait for it, in their
next attempt. What its actor still knows of their model calls is fetched before: a dead engine leaves the tokens behind.
It takes no work before it holds the weights that the others hold. Nothing here knows Ray.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from gpu_workers.controller.failures import backoff_s, is_infrastructure
from gpu_workers.controller.ports import GroupOrder, KnownCall, Peek, RolloutResult, Trace, WeightsRef
from gpu_workers.controller.signal import Signal
from gpu_workers.environments.ports import EnvironmentControl
from gpu_workers.generation.peeks import Salvage, merged
from gpu_workers.generation.supervised_environment import SupervisedEnvironment, instance_name
from storage.errors import GeneratorLost, InfrastructureFailure, MidflightError, WorkerDied
from storage.run_config import RunConfig

# Of the longest time that a look at the running calls may take: who does not answer by then must not cost the others'
# answers, which the caller waits for no longer than that time.
_OWN_SHARE = 0.8
# A dead engine's actor is asked once, for all the tokens that it has, by nobody who holds a snapshot up: it may take as
# long as so many looks, which is less than the restart that waits for it.
_SALVAGE_LOOKS = 5


class LiveGenerator(Protocol):
    """One generator that was started. Its calls raise `InfrastructureFailure` when it is dead."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Its process ids and what else it says about itself."""
        ...

    @property
    def environment(self) -> EnvironmentControl:
        """The control plane of the episodes that run there."""
        ...

    def generate(self, order: GroupOrder) -> AsyncGenerator[RolloutResult, None]:
        """As in the port `Generator`."""
        ...

    async def peek(self, wanted: Mapping[str, KnownCall] | None) -> Peek:
        """The running calls of these rollouts; None: all of them, whole. Answers when only the engine is dead."""
        ...

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        """As in the port `Generator`."""
        ...

    async def abort(self, group_id: str) -> None:
        """As in the port `Generator`."""
        ...

    async def is_alive(self) -> bool:
        """Whether actor and engine can still do anything; never raises."""
        ...


class GeneratorHost(Protocol):
    """Where generators are started."""

    async def start(self, index: int) -> LiveGenerator:
        """End what is left of generator `index` and start it as before. Raises a retryable error if trying again
        can help."""
        ...


@dataclass(slots=True)
class _Slot:
    index: int
    live: LiveGenerator | None
    facts: Mapping[str, Any]
    running: set[str] = field(default_factory=set)
    restarts_in_a_row: int = 0
    restart: asyncio.Task[None] | None = None
    lost: Exception | None = None
    salvaging: asyncio.Task[None] | None = None
    salvage: Salvage = field(default_factory=Salvage)


def _environment_of(slot: _Slot) -> EnvironmentControl | None:
    return None if slot.live is None else slot.live.environment


class SupervisedGenerators:
    """The port `Generator` over generators that may die."""

    def __init__(
        self, config: RunConfig, host: GeneratorHost, generators: Sequence[LiveGenerator], *, trace: Trace
    ) -> None:
        self._host = host
        self._trace = trace
        self._limits = config.async_rl
        self._keeps_tokens = False  # until a group runs whose level does, whatever the configuration says by now
        self._peek_s = _OWN_SHARE * config.rollout_recovery.peek_deadline_s
        self._most_restarts = config.generation.max_generator_restarts
        self._slots = [_Slot(index, live, live.facts) for index, live in enumerate(generators)]
        self._current: WeightsRef | None = None
        self._closed = False
        self._changed = Signal()

    @property
    def facts(self) -> list[Mapping[str, Any]]:
        """Of each generator its process ids; of one that is down those it had."""
        return [slot.facts for slot in self._slots]

    @property
    def environments(self) -> list[EnvironmentControl]:
        """The environments of multi-turn rollouts: one instance in each generator, whichever process that is."""
        return [SupervisedEnvironment(slot.index, partial(_environment_of, slot)) for slot in self._slots]

    async def generate(self, order: GroupOrder) -> AsyncGenerator[RolloutResult, None]:
        """Run a group on the living generator with the fewest groups, or where its episodes were restored; waits while
        none lives.

        Raises `WorkerDied` when it dies meanwhile, `GeneratorLost` when none will live again.
        """
        self._keeps_tokens |= order.keeps_running
        living = await self._living()
        home = [one for one in living if instance_name(one[0].index) == order.instance]
        slot, live = min(home or living, key=lambda one: len(one[0].running))
        slot.running.add(order.group_id)
        try:
            async with contextlib.aclosing(live.generate(order)) as results:
                async for result in results:
                    yield result
            slot.restarts_in_a_row = 0
        except InfrastructureFailure as failure:
            if await self._is_dead(slot, live, str(failure)):
                raise WorkerDied(f"generator {slot.index} died while it ran {order.group_id}: {failure}") from failure
            raise
        finally:
            slot.running.discard(order.group_id)

    async def peek(self, wanted: Mapping[str, KnownCall]) -> Peek:
        """The running calls of these rollouts, of all living generators, and what was left of one that died.

        One that fails, or does not answer in time, is left out.
        """
        asked = [self._peek(slot, slot.live, wanted) for slot in self._slots if slot.live is not None]
        answers = await asyncio.gather(*asked)
        return merged([*answers, *(slot.salvage.take(wanted) for slot in self._slots)])

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        """Refit every living generator; returns the slowest one's timings. Those that are down load it when they start.

        Waits until one lives. Raises the failure of a generator that lives and can't load them, or `GeneratorLost`.
        """
        self._current = weights
        while True:
            refits = [self._refit(slot, live, weights) for slot, live in await self._living()]
            timings = [found for found in await asyncio.gather(*refits) if found is not None]
            if timings:
                return {key: max(one[key] for one in timings) for key in timings[0]}

    async def abort(self, group_id: str) -> None:
        """Stop a group wherever it runs. All are asked: a stream that was given up is not counted any more."""
        await asyncio.gather(*(slot.live.abort(group_id) for slot in self._slots if slot.live is not None))

    async def close(self) -> None:
        """Start nothing any more."""
        self._closed = True
        tasks = [task for slot in self._slots for task in (slot.salvaging, slot.restart) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _living(self) -> list[tuple[_Slot, LiveGenerator]]:
        """Those that live, at least one."""
        await self._changed.wait_for(lambda: any(s.live for s in self._slots) or all(s.lost for s in self._slots))
        living = [(slot, slot.live) for slot in self._slots if slot.live is not None]
        if not living:
            cause = self._slots[-1].lost
            raise GeneratorLost(f"no generator is left: {cause}") from cause
        return living

    async def _refit(self, slot: _Slot, live: LiveGenerator, weights: WeightsRef) -> Mapping[str, float] | None:
        """Timings; None when the generator died, and is started again with these weights."""
        try:
            return await live.load_weights(weights)
        except InfrastructureFailure as failure:
            if await self._is_dead(slot, live, str(failure)):
                return None
            raise

    async def _is_dead(self, slot: _Slot, live: LiveGenerator, reason: str) -> bool:
        """Whether this generator is dead; the first one to notice has it started again."""
        if slot.live is live and not self._closed and not await live.is_alive() and slot.live is live:
            slot.live = None
            self._trace.record("generator_died", index=slot.index, reason=reason[:500], groups=len(slot.running))
            if self._keeps_tokens:
                slot.salvaging = asyncio.create_task(self._salvage(slot, live), name=f"salvage of {slot.index}")
            slot.restart = asyncio.create_task(self._restart(slot, reason), name=f"restart of generator {slot.index}")
        if slot.live is not live and slot.salvaging is not None:
            await asyncio.wait({slot.salvaging})  # who is told of the death finds what is left of its calls
        return slot.live is not live

    async def _salvage(self, slot: _Slot, dead: LiveGenerator) -> None:
        """What the actor of a dead engine still knows, before the restart ends it."""
        slot.salvage = Salvage(await self._peek(slot, dead, None, looks=_SALVAGE_LOOKS))

    async def _peek(
        self, slot: _Slot, live: LiveGenerator, wanted: Mapping[str, KnownCall] | None, *, looks: int = 1
    ) -> Peek:
        limit_s = looks * self._peek_s
        try:
            async with asyncio.timeout(limit_s):
                return await live.peek(wanted)
        except (MidflightError, TimeoutError) as error:
            reason = str(error) or f"no answer within {limit_s:g} s"
            self._trace.record("peek_failed", index=slot.index, reason=reason[:500])
            return Peek()

    async def _restart(self, slot: _Slot, reason: str) -> None:
        """Start a generator until it lives, with pauses, or is lost."""
        began = time.monotonic()
        if slot.salvaging is not None:
            await asyncio.wait({slot.salvaging})
        while slot.live is None:
            if slot.restarts_in_a_row >= self._most_restarts:
                return self._lose(slot, reason)
            pause_s = backoff_s(
                slot.restarts_in_a_row, first_s=self._limits.retry_backoff_s, most_s=self._limits.retry_backoff_max_s
            )
            slot.restarts_in_a_row += 1
            await asyncio.sleep(pause_s)
            try:
                live = await self._host.start(slot.index)
                version = await self._load_current(live)
            except Exception as error:  # noqa: BLE001 -- whatever it is, those who wait for this generator learn of it
                reason = f"{type(error).__name__}: {error}"
                if not is_infrastructure(error):
                    return self._lose(slot, reason)
            else:
                slot.live, slot.facts = live, live.facts
                facts = {"index": slot.index, "version": version, "restarts_in_a_row": slot.restarts_in_a_row}
                seconds = time.monotonic() - began
                self._trace.record("generator_restarted", **facts, pids=dict(live.facts), seconds=seconds)
        self._changed.notify()
        return None

    async def _load_current(self, live: LiveGenerator) -> int | None:
        """Load the newest weights; when newer ones came meanwhile, those too, whatever became of the older."""
        loaded: WeightsRef | None = None
        while (wanted := self._current) is not None and wanted is not loaded:
            try:
                await live.load_weights(wanted)
            except InfrastructureFailure:
                if self._current is wanted:
                    raise
            loaded = wanted
        return None if loaded is None else loaded.version

    def _lose(self, slot: _Slot, reason: str) -> None:
        slot.lost = GeneratorLost(
            f"generator {slot.index} was started again {slot.restarts_in_a_row} times in a row "
            f"(generation.max_generator_restarts {self._most_restarts}), at last: {reason}; see its log, mend the "
            "cause and resume the run"
        )
        self._trace.record("generator_lost", index=slot.index, reason=reason[:500])
        self._changed.notify()
