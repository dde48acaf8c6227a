"""`weight_fifo`: trains the oldest weight version first and waits for all of its groups."""

from collections.abc import Sequence

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from gpu_workers.controller.samplers.selection import bounded
from gpu_workers.controller.samplers.version_gate import VersionGate
from storage.records import BufferedGroup, LedgerGroup


class WeightFifoSampler(VersionGate):
    """No group is trained before one that was started from older weights, unless that one left the window."""

    name = "weight_fifo"
    restores_buffers = True
    claims = True

    def __init__(self, *, max_staleness_versions: int) -> None:
        super().__init__(max_staleness_versions)
        self._staleness = max_staleness_versions

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
        """Ready groups in the window, oldest start version first, none newer than the oldest unfinished one.

        Once all groups of a version are taken, the next version's follow: what was given up of one version is made
        up for by the next.
        """
        oldest = version - self._staleness
        awaited = [v for v in (group.start_version for group in unfinished) if v is not None and v >= oldest]
        newest = min(awaited, default=version)
        selectable = [group for group in ready if oldest <= group.start_version <= newest]
        selectable.sort(key=lambda group: (group.start_version, group.order))
        return bounded(selectable, least=least, most=most)

    def evict(self, ready: Sequence[BufferedGroup], *, version: int) -> list[BufferedGroup]:
        """Ready groups that have left the window."""
        return [group for group in ready if group.start_version < version - self._staleness]

    def should_abort_inflight(self, group: LedgerGroup, *, version: int) -> bool:
        """Never: unfinished groups are waited for while they are in the window."""
        return False

    def require_restorable(self, saved: SavedDispatch) -> None:
        """What any built-in sampler without stamps dispatched."""
        saved.require_unstamped(self.name)

    def restore(self, saved: SavedDispatch) -> None:
        """Continue from a saved cursor."""
        self.require_restorable(saved)
        self._cursor = saved.gated_cursor
