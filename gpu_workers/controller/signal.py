"""A pulse that wakes everyone who waits for a condition of the event loop's own state."""

import asyncio
from collections.abc import Callable


class Signal:
    """`notify()` after a change; `wait_for(predicate)` returns once the predicate holds. One event loop only."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Let every waiter look at its predicate again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return when `predicate()` is true; without suspending if it already is."""
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
