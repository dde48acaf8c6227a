"""`ready_first`: trains whatever is finished."""

from collections.abc import Sequence

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from gpu_workers.controller.samplers.selection import bounded
from gpu_workers.controller.samplers.version_gate import VersionGate
from storage.records import BufferedGroup, LedgerGroup


class ReadyFirstSampler(VersionGate):
    """The staleness bounds how far dispatch runs ahead, not how old a trained group may be: stragglers are kept."""

    name = "ready_first"
    restores_buffers = True
    claims = True

    def __init__(self, *, max_staleness_versions: int) -> None:
        super().__init__(max_staleness_versions)

    def admit(self, mutation: Mutation) -> None:
        """Count the batch; it gets no stamp."""
        self._advance(mutation)

    def select(
        self,
        ready: Sequence[BufferedGroup],
        unfinished: Sequence[LedgerGroup],
        *,
        version: int,
        least: int,
        most: int,
    ) -> list[BufferedGroup]:
        """Any ready groups, in dispatch order."""
        return bounded(ready, least=least, most=most)

    def evict(self, ready: Sequence[BufferedGroup], *, version: int) -> list[BufferedGroup]:
        """None: finished work is always trained."""
        return []

    def should_abort_inflight(self, group: LedgerGroup, *, version: int) -> bool:
        """Never."""
        return False

    def require_restorable(self, saved: SavedDispatch) -> None:
        """What any built-in sampler without stamps dispatched."""
        saved.require_unstamped(self.name)

    def restore(self, saved: SavedDispatch) -> None:
        """Continue from a saved cursor."""
        self.require_restorable(saved)
        self._cursor = saved.gated_cursor
