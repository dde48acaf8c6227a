"""What the step in training still needs. Asked anew each time: claims fill it, drops shrink it, the end of the data
closes it.
"""

from gpu_workers.controller.parts import RolloutParts
from storage.records import BufferedGroup


class StepDemand:
    """Reads the owners and keeps nothing. Claimed groups are those of the step in training.

    A step is fed in chunks of at least `async_rl.min_groups_for_streaming_train` groups; only its last one may be
    smaller. Without that option the whole step is one chunk.
    """

    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts
        self._step_size = parts.config.algorithm.num_prompts_per_step
        self._chunk = parts.config.async_rl.min_groups_for_streaming_train or self._step_size

    def wanted(self) -> int:
        """Groups of a whole step, less those that will never arrive for it."""
        return self._step_size - self._parts.state.shortfall.get(self._parts.state.trainer_version, 0)

    def left(self) -> int:
        """Groups that the step has still to claim."""
        return self.wanted() - len(self._parts.buffer.claimed())

    def next_chunk(self) -> list[BufferedGroup]:
        """Finished groups to train next, in this order; empty while there are too few, and once the step is whole."""
        parts, left = self._parts, self.left()
        if left <= 0:
            return []
        # Without stamps no step has a shortfall: the last one takes what is left.
        takes_the_rest = parts.state.stamps is False and self.is_starved()
        least = 1 if takes_the_rest else min(self._chunk, left)
        ready, unfinished = parts.buffer.ready(), parts.ledger.admitted()
        return parts.sampler.select(ready, unfinished, version=parts.state.trainer_version, least=least, most=left)

    def is_whole(self) -> bool:
        """Whether the step needs nothing more."""
        if self.left() <= 0:
            return True
        ends = self._parts.state.stamps is False and self.is_starved() and bool(self._parts.buffer.claimed())
        return ends and not self.next_chunk()

    def is_starved(self) -> bool:
        """Nothing more can ever come: the source is exhausted, no whole spare batch is left, the ledger is empty."""
        no_spare_batch = len(self._parts.state.spares) < self._step_size
        return self._parts.source.exhausted and no_spare_batch and not len(self._parts.ledger)
