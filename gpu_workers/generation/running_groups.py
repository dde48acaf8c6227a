"""The running model calls of each group: started together, handed out as they finish, or aborted."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class RunningGroups(Generic[Key, Result]):
    """Owns the tasks of all groups. Everything happens on one event loop."""

    def __init__(self, on_abort: Callable[[str, Key], Result]) -> None:
        """`on_abort(group_id, key)` is what an aborted call counts as."""
        self._on_abort = on_abort
        self._tasks: defaultdict[str, set[asyncio.Task[Result]]] = defaultdict(set)

    async def run(self, group_id: str, calls: Mapping[Key, Coroutine[Any, Any, Result]]) -> AsyncIterator[list[Result]]:
        """Run the calls together; yield results as soon as there are any, those that finish together in one list.

        The first exception of a call ends the rest. Leaving the iteration early ends them too.
        """
        finished: asyncio.Queue[asyncio.Task[Result]] = asyncio.Queue()
        keys = {asyncio.create_task(call): key for key, call in calls.items()}
        self._tasks[group_id].update(keys)
        for task in keys:
            task.add_done_callback(finished.put_nowait)
        try:
            left = len(keys)
            while left:
                done = [await finished.get()]
                while not finished.empty():
                    done.append(finished.get_nowait())
                left -= len(done)
                yield [self._on_abort(group_id, keys[t]) if t.cancelled() else t.result() for t in done]
        finally:
            self._forget(group_id, set(keys))
            for task in keys:
                task.cancel()
            await asyncio.gather(*keys, return_exceptions=True)

    def abort(self, group_id: str) -> None:
        """End the group's running calls; their iterations yield what `on_abort` says. Unknown groups are ignored."""
        for task in self._tasks.get(group_id, ()):
            task.cancel()

    def _forget(self, group_id: str, tasks: set[asyncio.Task[Result]]) -> None:
        """A group may run twice at once for a moment, when an aborted one is dispatched again."""
        self._tasks[group_id] -= tasks
        if not self._tasks[group_id]:
            del self._tasks[group_id]
