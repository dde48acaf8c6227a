"""`in_order`: trains batches in the order they were dispatched."""

from collections.abc import Callable, Sequence

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

    def __init__(self, *, max_lookahead_versions: int, lookahead_at: Callable[[int], int] | None = None) -> None:
        """`lookahead_at(version)` is the lookahead at one version, at most `max_lookahead_versions`."""
        super().__init__(max_lookahead_versions)
        self._lookahead_at = lookahead_at

    def may_admit(self, version: int) -> bool:
        """Whether target step cursor + 1 lies within the lookahead of `version`."""
        lookahead = self._lookahead if self._lookahead_at is None else self._lookahead_at(version)
        return self._cursor < version + lookahead

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
