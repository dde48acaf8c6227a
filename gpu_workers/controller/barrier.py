"""The data-plane barrier: many mutations together, or one cut alone; a waiting cut goes first.

Both contexts yield a capability that ledger, buffer and row store demand, so that their state cannot change, nor be
captured, outside the barrier.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gpu_workers.controller.signal import Signal
from storage.errors import BrokenInvariant


class Capability:
    """Proof of being inside the barrier. Dead as soon as its context is left."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._live = True

    def require_live(self) -> None:
        """Raise `BrokenInvariant` when the context this capability came from was left."""
        if not self._live:
            raise BrokenInvariant(f"{type(self).__name__} '{self.kind}' is used after its barrier section ended")

    def expire(self) -> None:
        """Called by the barrier when the section ends."""
        self._live = False


class Mutation(Capability):
    """The right to change rollout state, shared with other mutations."""


class Cut(Capability):
    """The right to capture rollout state; nobody changes it meanwhile."""


@dataclass(slots=True)
class WaitStatistics:
    """How long sections of one kind waited to enter, in seconds."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one wait."""
        self.count += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)


class DataPlaneBarrier:
    """Shared/exclusive, writer-preferring, re-entrant for mutations within a task."""

    def __init__(self) -> None:
        self.mutation_version = 0
        self.waits: defaultdict[str, WaitStatistics] = defaultdict(WaitStatistics)
        self._changed = Signal()
        self._mutations: dict[asyncio.Task[object], Mutation] = {}
        self._cut_task: asyncio.Task[object] | None = None
        self._waiting_cuts = 0

    @asynccontextmanager
    async def mutation(self, kind: str) -> AsyncIterator[Mutation]:
        """Change rollout state. Nested sections of the same task join the outer one.

        Raises `BrokenInvariant` inside a cut of the same task.
        """
        task = _current_task()
        outer = self._mutations.get(task)
        if outer is not None:
            yield outer
            return
        if self._cut_task is task:
            raise BrokenInvariant(f"mutation '{kind}' inside a cut of the same task")
        await self._enter(kind, lambda: self._cut_task is None and self._waiting_cuts == 0)
        mutation = self._mutations[task] = Mutation(kind)
        try:
            yield mutation
        finally:
            mutation.expire()
            del self._mutations[task]
            self.mutation_version += 1
            self._changed.notify()

    @asynccontextmanager
    async def cut(self, kind: str = "cut") -> AsyncIterator[Cut]:
        """Capture rollout state: blocks new mutations, waits for active ones, serializes with other cuts."""
        task = _current_task()
        if task in self._mutations or self._cut_task is task:
            raise BrokenInvariant(f"cut '{kind}' inside another barrier section of the same task would deadlock")
        self._waiting_cuts += 1
        try:
            await self._enter(kind, lambda: not self._mutations and self._cut_task is None)
        finally:
            self._waiting_cuts -= 1
            self._changed.notify()
        self._cut_task = task
        cut = Cut(kind)
        try:
            yield cut
        finally:
            cut.expire()
            self._cut_task = None
            self._changed.notify()

    async def _enter(self, kind: str, free: Callable[[], bool]) -> None:
        started = time.perf_counter()
        await self._changed.wait_for(free)
        self.waits[kind].add(time.perf_counter() - started)


def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    if task is None:
        raise BrokenInvariant("the data-plane barrier is used outside an asyncio task")
    return task
