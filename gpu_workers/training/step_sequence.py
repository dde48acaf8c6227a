"""Which optimizer step is open and what the last one returned."""

from collections.abc import Callable

from gpu_workers.controller.ports import StepResult
from gpu_workers.training.train_step import TrainStep
from storage.errors import BrokenInvariant, StepOutOfOrder


class StepSequence:
    """Steps in their order, each finished once.

        finished n --begin(n+1)--> open n+1 --commit--> finished n+1
                                     | ^
                                     +-+ begin(n+1): start again

    A trainer starts as if step `last.step` had just been finished (0: nothing trained yet).
    """

    def __init__(self, last: StepResult) -> None:
        self._last = last
        self._open: TrainStep | None = None

    @property
    def last(self) -> StepResult:
        """The result of the newest finished step."""
        return self._last

    def begin(self, step: int, create: Callable[[], TrainStep]) -> None:
        """Open a step, or open it again. Raises: StepOutOfOrder unless it follows the last finished one;
        BrokenInvariant if the open one is torn."""
        self.refuse_torn()
        if step == self._last.step:
            raise StepOutOfOrder(f"step {step} is finished already; finish_step({step}) returns its result")
        if step != self._last.step + 1:
            raise StepOutOfOrder(
                f"step {step} can't begin: the trainer has finished step {self._last.step}; "
                f"begin step {self._last.step + 1}"
            )
        self._open = create()

    def open_step(self) -> TrainStep:
        """The step that is open. Raises: StepOutOfOrder if none is."""
        if self._open is None:
            raise StepOutOfOrder(
                f"no step is open after step {self._last.step}; call begin_step({self._last.step + 1})"
            )
        return self._open

    def refuse_torn(self) -> None:
        """Raise BrokenInvariant if the open step ended between two of its updates: only a restore helps then."""
        if self._open is not None and self._open.torn:
            raise BrokenInvariant(
                f"step {self._last.step + 1} ended in an error between two of its updates, so that the weights belong "
                "to no step; restore a checkpoint"
            )

    def finished(self, step: int) -> StepResult | None:
        """The result of `step` if it was the last one finished; None if it is open and has to be finished now.

        Raises: StepOutOfOrder for any other step.
        """
        if self._open is None and step == self._last.step:
            return self._last
        self.open_step()
        if step != self._last.step + 1:
            raise StepOutOfOrder(f"step {step} can't be finished: the open step is {self._last.step + 1}")
        return None

    def commit(self, result: StepResult) -> StepResult:
        """The open step is finished with this result."""
        self._last = result
        self._open = None
        return result
