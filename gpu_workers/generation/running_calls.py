"""The running model calls of a generator: started by group, collected in one place as they finish, or aborted."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Finished(Generic[Result]):
    """One call's result or exception, with the ticket under which it was started."""

    ticket: int
    result: Result | Exception


class RunningCalls(Generic[Key, Result]):
    """Owns the tasks of all calls. Everything happens on one event loop."""

    def __init__(self, on_abort: Callable[[str, Key], Result]) -> None:
        """`on_abort(group_id, key)` is what an aborted call counts as."""
        self._on_abort = on_abort
        self._running: dict[asyncio.Task[Result], tuple[int, str, Key]] = {}
        self._finished: list[Finished[Result]] = []
        self._changed = asyncio.Event()
        self._reader = 0

    def start(self, ticket: int, group_id: str, calls: Mapping[Key, Coroutine[Any, Any, Result]]) -> None:
        """Run the calls together; each appears in `take` once, whatever becomes of it."""
        for key, call in calls.items():
            task = asyncio.create_task(call)
            self._running[task] = (ticket, group_id, key)
            task.add_done_callback(self._collect)

    def report(self, ticket: int, result: Result) -> None:
        """Something that a running call has to say before its end."""
        self._finished.append(Finished(ticket, result))
        self._changed.set()

    def abort(self, group_id: str) -> None:
        """End the group's running calls; they finish as `on_abort` says. Unknown groups are ignored."""
        for task, (_, group, _) in self._running.items():
            if group == group_id:
                task.cancel()

    def abandon(self, ticket: int) -> None:
        """End what still runs under a ticket that nobody waits for."""
        for task, (owner, _, _) in self._running.items():
            if owner == ticket:
                task.cancel()

    def open_reader(self) -> int:
        """A reader for `take`; earlier ones get nothing any more."""
        self._reader += 1
        self._changed.set()
        return self._reader

    async def take(self, reader: int) -> list[Finished[Result]] | None:
        """Wait until calls are finished; everything that finished since the last time, in that order.

        None once another reader has taken over.
        """
        while reader == self._reader:
            if self._finished:
                taken, self._finished = self._finished, []
                return taken
            self._changed.clear()
            await self._changed.wait()
        return None

    def _collect(self, task: asyncio.Task[Result]) -> None:
        ticket, group_id, key = self._running.pop(task)
        self._finished.append(Finished(ticket, self._outcome(task, group_id, key)))
        self._changed.set()

    def _outcome(self, task: asyncio.Task[Result], group_id: str, key: Key) -> Result | Exception:
        if task.cancelled():
            return self._on_abort(group_id, key)
        error = task.exception()
        if error is None:
            return task.result()
        return error if isinstance(error, Exception) else RuntimeError(f"call of {group_id} ended with {error!r}")
