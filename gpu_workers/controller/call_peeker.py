"""Looks at the running model calls of all generators: at intervals, just before each snapshot, and after a failure."""

import asyncio
import time

from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import Generator, Peek

# Beyond the deadline that each generator is given.
_SLACK_S = 0.5


class CallPeeker:
    """One look at a time. All who ask during one share the next, which knows more."""

    def __init__(self, parts: RolloutParts, generator: Generator) -> None:
        self._parts = parts
        self._generator = generator
        self._lock = asyncio.Lock()
        self._looks = 0
        self._unreadable: dict[str, str] = {}

    @property
    def unreadable(self) -> int:
        """Running calls that the last look could not read."""
        return len(self._unreadable)

    async def look(self) -> float:
        """Take over the tokens that running calls have by now. Returns milliseconds; never raises, nor waits longer
        than `rollout_recovery.peek_deadline_s` and a little for the generators.
        """
        began, looks = time.perf_counter(), self._looks
        async with self._lock:
            if self._looks == looks:
                self._looks += 1
                await self._look()
        return (time.perf_counter() - began) * 1000

    async def _look(self) -> None:
        wanted, deadline_s = self._parts.partial_calls.wanted(), self._parts.config.rollout_recovery.peek_deadline_s
        if not wanted:
            return
        try:
            async with asyncio.timeout(deadline_s + _SLACK_S):
                peek = await self._generator.peek(wanted)
        except TimeoutError:
            reason = f"no answer within rollout_recovery.peek_deadline_s {deadline_s} s"
            self._parts.trace.record("peek_failed", reason=reason)
        else:
            await self._take(peek)

    async def _take(self, peek: Peek) -> None:
        news = [call for call in peek.calls if self._parts.partial_calls.is_news(call)]
        if news:
            async with self._parts.barrier.mutation("peek") as mutation:
                self._parts.partial_calls.extend(mutation, news)
        for rollout, reason in peek.unreadable.items():
            if self._unreadable.get(rollout) != reason:
                self._parts.trace.record("call_unreadable", rollout_id=rollout, reason=reason[:500])
        self._unreadable = dict(peek.unreadable)

    async def run(self) -> None:
        """Look at intervals, for ever: what a lost machine had sampled is known up to the last of them."""
        while True:
            await asyncio.sleep(self._parts.config.rollout_recovery.peek_interval_s)
            await self.look()
