"""One train step while it is open: rows are taken in forward passes of a fixed size, then the networks are updated."""

import time
from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from gpu_workers.training.learner import Learner
from gpu_workers.training.step_rows import StepRows, TrainedRow
from storage.errors import BrokenInvariant, StepOutOfOrder


class Updates(Protocol):
    """What a step does with its rows: one optimizer update, or several."""

    def take(self, rows: Sequence[TrainedRow]) -> None:
        """Use rows of one forward pass, without changing any network. Raises: BrokenInvariant for a loss that isn't
        finite; the step then has to be begun again."""
        ...

    def finish(self, rows: StepRows) -> dict[str, float]:
        """Update the networks from all that was taken; `rows` describes those of all ranks. Returns metrics.

        Raises: BrokenInvariant if a loss or gradient norm isn't finite, before the update it belongs to."""
        ...

    @property
    def num_updates(self) -> int:
        """Optimizer updates made so far, of any network."""
        ...


class TrainStep:
    """Takes whole groups in order, then updates the networks.

    Forward passes hold `microbatch_rows` rows each, counted over the whole step: rows of a call that do not fill one
    wait for the next call or the end. The result thus depends on the rows and their order, never on how calls cut
    them. Row i of those that enter the loss belongs to rank i mod size. Masked rows, and groups of equal rewards that
    are filtered, are not computed; a step that has nothing else leaves networks and optimizers as they are.
    """

    def __init__(self, updates: Updates, learner: Learner) -> None:
        self._updates = updates
        self._ranks = learner.ranks
        self._microbatch_rows = learner.config.microbatch_rows
        self._rows = StepRows(learner.config, vocabulary_size=learner.policy.vocabulary_size)
        self._pending: list[TrainedRow] = []
        self._seconds = 0.0
        self._usable = True

    @property
    def torn(self) -> bool:
        """Whether the step ended between two of its updates: the networks then belong to no step."""
        return not self._usable and self._updates.num_updates > 0

    def add(self, batches: Sequence[pa.RecordBatch]) -> dict[str, float]:
        """Take whole groups; returns what the call brought: groups, rows, tokens, seconds.

        Raises: BrokenInvariant for rows that `read_groups` refuses or a group that came before (the step is as it was
        and can go on), and for a loss that isn't finite (the step has to be begun again).
        """
        started = time.perf_counter()
        self._demand_usable()
        taken = self._rows.take(batches)
        self._pending += [row for row in taken.trained if row.number % self._ranks.size == self._ranks.rank]
        self._compute(at_least=self._microbatch_rows)
        seconds = time.perf_counter() - started
        self._seconds += seconds
        return {
            "groups": float(taken.num_groups),
            "rows": float(taken.num_rows),
            "tokens": float(taken.num_tokens),
            "seconds": seconds,
        }

    def flush(self) -> None:
        """Compute the rows that wait for a full forward pass. Call it after the last rows of a step only: what comes
        later starts a new pass. Raises: BrokenInvariant for a loss that isn't finite."""
        started = time.perf_counter()
        self._demand_usable()
        self._compute(at_least=1)
        self._seconds += time.perf_counter() - started

    def apply(self) -> dict[str, float]:
        """Compute what is pending, update the networks. Returns the step's metrics.

        Raises: BrokenInvariant if a loss or gradient norm isn't finite. Before the first update the step can be begun
        again; later the step is `torn`.
        """
        started = time.perf_counter()
        self._demand_usable()
        self._compute(at_least=1)
        self._usable = False
        metrics = self._updates.finish(self._rows)
        return {
            **metrics,
            **self._rows.metrics(),
            "tokens": float(self._rows.num_tokens),
            "updates": float(self._updates.num_updates),
            "seconds": self._seconds + time.perf_counter() - started,
        }

    def _compute(self, *, at_least: int) -> None:
        size = self._microbatch_rows
        while len(self._pending) >= at_least:
            rows, self._pending = self._pending[:size], self._pending[size:]
            try:
                self._updates.take(rows)
            except BrokenInvariant as error:
                self._usable = False
                raise BrokenInvariant(f"{error} (after {self._rows.num_groups} groups of the step)") from error

    def _demand_usable(self) -> None:
        if not self._usable:
            raise StepOutOfOrder("the open step ended in an error or was applied; begin it again with begin_step")


def infinite_loss(what: str, num_tokens: int) -> BrokenInvariant:
    """The error for a loss that isn't finite."""
    return BrokenInvariant(
        f"the {what} is not finite after {num_tokens} tokens; the update was not taken; look at the weights (their "
        "last gradient norm) and at the rows' log-probabilities"
    )
