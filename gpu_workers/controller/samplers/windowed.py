"""`windowed`: dispatches without waiting for the trainer and trains what is fresh enough."""

from collections.abc import Sequence

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from gpu_workers.controller.samplers.selection import bounded
from storage.records import BufferedGroup, LedgerGroup


class WindowedSampler:
    """Oversamples: only capacity bounds dispatch, and what leaves the window is given up, finished or not."""

    name = "windowed"
    restores_buffers = True
    claims = True

    def __init__(self, *, max_staleness_versions: int, freshest_first: bool) -> None:
        self._staleness = max_staleness_versions
        self._freshest_first = freshest_first
        self._cursor = -1

    @property
    def cursor(self) -> int:
        """The last dispatched batch; -1 before the first. It gates nothing."""
        return self._cursor

    def may_admit(self, version: int) -> bool:
        """Always."""
        return True

    def admit(self, mutation: Mutation) -> None:
        """Count the batch; it gets no stamp."""
        mutation.require_live()
        self._cursor += 1

    def select(
        self,
        ready: Sequence[BufferedGroup],
        unfinished: Sequence[LedgerGroup],
        *,
        version: int,
        least: int,
        most: int,
    ) -> list[BufferedGroup]:
        """Ready groups in the window, in dispatch order or those with the newest start version first."""
        selectable = [group for group in ready if self._is_in_window(group.start_version, version)]
        if self._freshest_first:
            selectable.sort(key=lambda group: (-group.start_version, group.order))
        return bounded(selectable, least=least, most=most)

    def evict(self, ready: Sequence[BufferedGroup], *, version: int) -> list[BufferedGroup]:
        """Ready groups that have left the window."""
        return [group for group in ready if not self._is_in_window(group.start_version, version)]

    def should_abort_inflight(self, group: LedgerGroup, *, version: int) -> bool:
        """An unfinished group that has left the window."""
        return group.start_version is not None and not self._is_in_window(group.start_version, version)

    def required_capacity(self, num_prompts_per_step: int) -> None:
        """No bound."""

    def require_restorable(self, saved: SavedDispatch) -> None:
        """What any built-in sampler without stamps dispatched."""
        saved.require_unstamped(self.name)

    def restore(self, saved: SavedDispatch) -> None:
        """Continue from a saved cursor."""
        self.require_restorable(saved)
        self._cursor = saved.cursor

    def _is_in_window(self, start_version: int, version: int) -> bool:
        return start_version >= version - self._staleness
