"""Deadlines of running groups, which stand still while the environment is closed for a checkpoint."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class RolloutDeadlines:
    """All deadlines of one event loop."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Timeout, float | None] = {}
        self._paused_at: float | None = None

    @asynccontextmanager
    async def of(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError out of the body once it has run for `seconds`, pauses not counted."""
        loop = asyncio.get_running_loop()
        paused = self._paused_at is not None
        async with asyncio.timeout(None if paused else seconds) as timeout:
            self._running[timeout] = seconds if paused else None
            if not paused:
                timeout.reschedule(loop.time() + seconds)
            try:
                yield
            finally:
                del self._running[timeout]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No deadline passes meanwhile. Not nested."""
        loop = asyncio.get_running_loop()
        self._paused_at = now = loop.time()
        for timeout in self._running:
            due = timeout.when()
            self._running[timeout] = None if due is None else due - now
            timeout.reschedule(None)
        try:
            yield
        finally:
            self._paused_at = None
            for timeout, left in self._running.items():
                if left is not None:
                    timeout.reschedule(loop.time() + left)
                    self._running[timeout] = None
