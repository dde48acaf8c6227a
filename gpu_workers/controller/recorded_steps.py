"""Batches trained since the newest durable trainer checkpoint: a restart goes back to it and trains them again.

    (a step commits) --record--> recorded --forget--> (a checkpoint of that step, or of a later one, is durable)
    (a restore) --load--> recorded; each step from the checkpoint on takes its own batch again

Recorded groups are owned here: their rows stay in the data plane. Which of them are still to be trained again follows
from the trainer's step, and is not kept.
"""

from collections.abc import Iterable
from dataclasses import replace

from gpu_workers.controller.barrier import Cut, Mutation
from storage.errors import BrokenInvariant
from storage.records import BufferedGroup, TrainedGroup


class RecordedSteps:
    """The batch of each step, in training order."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[BufferedGroup, ...]] = {}

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> int:
        """The newest recorded step; 0 if there is none."""
        return max(self._batches, default=0)

    def batch(self, step: int) -> list[BufferedGroup] | None:
        """The groups of a recorded step in training order; None for a step that is not recorded."""
        return list(self._batches[step]) if step in self._batches else None

    def lead_from(self, model_step: int, *, to: int) -> bool:
        """Whether training recorded batches leads from a model of `model_step` to step `to`."""
        return all(step in self._batches for step in range(model_step + 1, to + 1))

    def record(self, mutation: Mutation, step: int, groups: Iterable[BufferedGroup]) -> None:
        """Take over the groups that `step` has trained."""
        mutation.require_live()
        if step in self._batches:
            raise BrokenInvariant(f"train step {step} is recorded twice")
        self._batches[step] = tuple(replace(group, claimed_by=None) for group in groups)

    def forget(self, mutation: Mutation, *, up_to: int) -> list[str]:
        """Let go of every step up to `up_to`. Returns the ids of their rows, which the caller removes."""
        mutation.require_live()
        forgotten = [step for step in self._batches if step <= up_to]
        return [row for step in forgotten for group in self._batches.pop(step) for row in group.row_ids]

    def capture(self, cut: Cut, *, after: int) -> tuple[TrainedGroup, ...]:
        """The recorded groups of every step after `after`, in training order."""
        cut.require_live()
        steps = sorted(step for step in self._batches if step > after)
        return tuple(TrainedGroup(s, place, group) for s in steps for place, group in enumerate(self._batches[s]))

    def rows(self, *, up_to: int) -> list[str]:
        """Ids of the rows of every step up to `up_to`."""
        return [row for s, groups in self._batches.items() if s <= up_to for group in groups for row in group.row_ids]

    def load(self, mutation: Mutation, trained: Iterable[TrainedGroup]) -> None:
        """Replace everything by restored groups."""
        mutation.require_live()
        batches: dict[int, list[BufferedGroup]] = {}
        for entry in sorted(trained, key=lambda entry: (entry.step, entry.position)):
            batches.setdefault(entry.step, []).append(entry.group)
        self._batches = {step: tuple(groups) for step, groups in batches.items()}
