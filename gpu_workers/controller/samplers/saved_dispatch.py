"""What a bundle says about dispatch, and which samplers may continue it: refused by name, never reinterpreted.

Every group carries its start version and its place in dispatch order, so that samplers which do not stamp restore each
other's groups. A stamp means a train step to one sampler only.
"""

import math
from dataclasses import dataclass
from typing import Self

from storage.errors import RestoreRefused
from storage.records import GroupPhase, RolloutState

UNSTAMPED_SAMPLERS = ("weight_fifo", "ready_first", "windowed")
_UNGATED_SAMPLERS = ("windowed",)


@dataclass(frozen=True, slots=True)
class SavedDispatch:
    """`target_steps`: stamps of all admitted groups in hand, finished or not; `batches`: how many steps they fill.

    The defaults are a run that has dispatched nothing.
    """

    sampler: str
    cursor: int = -1
    trainer_version: int = 0
    stamps: bool | None = None
    target_steps: tuple[int | None, ...] = ()
    batches: int = 0

    @classmethod
    def of(cls, state: RolloutState, *, num_prompts_per_step: int) -> Self:
        """The dispatch side of a rollout state."""
        progress = state.progress
        admitted = [g.target_step for g in state.ledger if g.phase is GroupPhase.ADMITTED]
        target_steps = (*(g.target_step for g in state.buffer), *admitted)
        return cls(
            sampler=progress.sampler,
            cursor=progress.sampler_cursor,
            trainer_version=progress.trainer_version,
            stamps=progress.stamps,
            target_steps=target_steps,
            batches=math.ceil(len(target_steps) / num_prompts_per_step),
        )

    @property
    def gated_cursor(self) -> int:
        """The cursor for a sampler that admits one batch for each version.

        After a sampler that dispatched without regard to versions: as if each batch in hand had been admitted so.
        """
        if self.sampler in _UNGATED_SAMPLERS:
            return self.trainer_version + self.batches - 1
        return self.cursor

    def require_sampler(self, name: str) -> None:
        """Raise `RestoreRefused` unless sampler `name` made the bundle."""
        if self.sampler != name:
            raise RestoreRefused(
                f"the snapshot was made with sampler '{self.sampler}', this run uses '{name}', which can't continue "
                f"it; set {_keys_of(self.sampler)}"
            )

    def require_unstamped(self, name: str) -> None:
        """Raise `RestoreRefused` unless a built-in sampler that does not stamp made the bundle."""
        if self.sampler not in UNSTAMPED_SAMPLERS:
            self.require_sampler(name)
        stamped = sorted({step for step in self.target_steps if step is not None})
        if self.stamps or stamped:
            raise RestoreRefused(
                f"the snapshot of sampler '{self.sampler}' holds groups stamped for target steps {stamped}, "
                f"sampler '{name}' does not stamp; restore an older snapshot"
            )

    def require_stamped(self, name: str) -> None:
        """Raise `RestoreRefused` when a group in hand has no stamp, or the cursor covers less than was dispatched."""
        if self.stamps is False or None in self.target_steps:
            raise RestoreRefused(
                f"the snapshot of sampler '{self.sampler}' holds groups without a target step, which sampler '{name}' "
                "could never select; restore an older snapshot"
            )
        if self.cursor < self.trainer_version - 1:
            raise RestoreRefused(
                f"the saved sampler cursor {self.cursor} lies before target step {self.trainer_version - 1}, which is "
                "trained already; restore an older snapshot"
            )
        self.require_covered()

    def require_covered(self) -> None:
        """Raise `RestoreRefused` when a group in hand has a stamp beyond the cursor."""
        highest = max((step for step in self.target_steps if step is not None), default=-1)
        if highest > self.cursor:
            raise RestoreRefused(
                f"the saved sampler cursor {self.cursor} does not cover target step {highest} of a restored group; "
                "restore an older snapshot"
            )


def _keys_of(sampler: str) -> str:
    if ":" in sampler:
        return f"async_rl.sampler to 'custom' and async_rl.custom_sampler to '{sampler}'"
    return f"async_rl.sampler to '{sampler}'"
