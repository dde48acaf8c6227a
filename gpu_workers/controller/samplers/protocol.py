"""The contract of all samplers. One object serves both pumps, so that admission and selection can't disagree."""

from collections.abc import Sequence
from typing import Protocol

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from storage.records import BufferedGroup, LedgerGroup


class SamplingPolicy(Protocol):
    """What every sampler answers; a class named by `async_rl.custom_sampler` provides exactly this.

    All answers but `admit` and `restore` are free of side effects: the pumps ask them as often as they like.
    `restores_buffers`: whether finished groups of a restored bundle can be selected. `claims`: what is selected stays
    in the replay buffer, claimed, until its step has committed, and may be given back before.
    """

    @property
    def restores_buffers(self) -> bool: ...

    @property
    def claims(self) -> bool: ...

    @property
    def cursor(self) -> int:
        """The dispatch cursor: -1 at first, at least every stamp given; saved and restored exactly."""
        ...

    def may_admit(self, version: int) -> bool:
        """Whether the next batch may be dispatched while the generators hold weight `version`. The pump waits."""
        ...

    def admit(self, mutation: Mutation) -> int | None:
        """Admit the next batch: its target step (0, 1, 2, ...; the version that trains it), or always None."""
        ...

    def select(
        self,
        ready: Sequence[BufferedGroup],
        unfinished: Sequence[LedgerGroup],
        *,
        version: int,
        least: int,
        most: int,
    ) -> list[BufferedGroup]:
        """Groups for the step that is trained at `version`, in training order: `least` to `most` of them, or none.

        `ready` are finished and unclaimed, `unfinished` admitted and not finished, both in dispatch order. A streamed
        step asks several times at one `version`: each answer is a chunk, `most` is what the step has left.
        """
        ...

    def evict(self, ready: Sequence[BufferedGroup], *, version: int) -> list[BufferedGroup]:
        """Finished groups that can't be selected at `version` or later, by the same key as `select`."""
        ...

    def should_abort_inflight(self, group: LedgerGroup, *, version: int) -> bool:
        """Whether this admitted, unfinished group could not be selected any more even if it were finished now."""
        ...

    def required_capacity(self, num_prompts_per_step: int) -> int | None:
        """Groups that buffer and flight must be able to hold together; None: the sampler sets no bound."""
        ...

    def restore(self, saved: SavedDispatch) -> None:
        """Continue from a saved cursor. Raises `RestoreRefused`, and then changes nothing."""
        ...


class Sampler(SamplingPolicy, Protocol):
    """A policy with the name it is saved under, which can tell beforehand what it would refuse to continue."""

    @property
    def name(self) -> str: ...

    def require_restorable(self, saved: SavedDispatch) -> None:
        """Raise the `RestoreRefused` that `restore` would raise; changes nothing."""
        ...
