"""`in_order`: trains batches in the order they were dispatched."""

from collections.abc import Sequence

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from gpu_workers.controller.samplers.selection import bounded
from gpu_workers.controller.samplers.version_gate import VersionGate
from storage.records import BufferedGroup, LedgerGroup


class InOrderSampler(VersionGate):
    """Batch s waits for the trainer to reach version s: its groups are stamped with it."""

    name = "in_order"
    restores_buffers = True
    claims = True

    def __init__(self, *, max_lookahead_versions: int) -> None:
        super().__init__(max_lookahead_versions)

    def admit(self, mutation: Mutation) -> int:
        """Give out the next target step."""
        return self._advance(mutation)

    def select(
        self,
        ready: Sequence[BufferedGroup],
        unfinished: Sequence[LedgerGroup],
        *,
        version: int,
        least: int,
        most: int,
    ) -> list[BufferedGroup]:
        """Ready groups whose stamp is `version`, in dispatch order."""
        return bounded([group for group in ready if group.target_step == version], least=least, most=most)

    def evict(self, ready: Sequence[BufferedGroup], *, version: int) -> list[BufferedGroup]:
        """Ready groups whose stamp has passed."""
        return [group for group in ready if group.target_step is None or group.target_step < version]

    def should_abort_inflight(self, group: LedgerGroup, *, version: int) -> bool:
        """Never: a step is trained only after every group stamped for it has arrived or was given up."""
        return False

    def require_restorable(self, saved: SavedDispatch) -> None:
        """Only what in_order dispatched, under a cursor that covers every stamp."""
        saved.require_sampler(self.name)
        saved.require_stamped(self.name)

    def restore(self, saved: SavedDispatch) -> None:
        """Continue from a saved cursor."""
        self.require_restorable(saved)
        self._cursor = saved.cursor
