"""Samplers decide when a batch may be dispatched and which finished groups a train step takes."""

from collections.abc import Sequence
from typing import Protocol

from gpu_workers.controller.barrier import Mutation
from storage.errors import ConfigurationError, RestoreRefused
from storage.records import BufferedGroup
from storage.run_config import RunConfig


class Sampler(Protocol):
    """One object that both pumps use. Waiting for admission is the pump's; committing it is `admit`."""

    name: str
    restores_buffers: bool

    @property
    def cursor(self) -> int:
        """The dispatch cursor; saved and restored exactly."""
        ...

    def may_admit(self, version: int) -> bool:
        """Whether the next batch may be dispatched while the generators hold weight `version`."""
        ...

    def admit(self, mutation: Mutation) -> int | None:
        """Admit the next batch and return its target step, or None for a sampler that does not stamp."""
        ...

    def select(self, ready: Sequence[BufferedGroup], *, version: int, most: int) -> list[BufferedGroup]:
        """Groups for the step that is trained at `version`, in training order, at most `most`."""
        ...

    def evict(self, ready: Sequence[BufferedGroup], *, version: int) -> list[BufferedGroup]:
        """Groups that can never be selected any more."""
        ...

    def required_capacity(self, num_prompts_per_step: int) -> int:
        """Groups that buffer and flight must be able to hold."""
        ...

    def restore(self, *, name: str, cursor: int, stamps: Sequence[int]) -> None:
        """Continue from a saved cursor. Raises `RestoreRefused` for another sampler or an uncovered stamp."""
        ...


class InOrderSampler:
    """Trains batches in the order they were dispatched: batch s waits for the trainer to reach version s."""

    name = "in_order"
    restores_buffers = True

    def __init__(self, *, max_lookahead_versions: int) -> None:
        self._lookahead = max_lookahead_versions
        self._cursor = -1

    @property
    def cursor(self) -> int:
        """The highest target step admitted so far; -1 before the first."""
        return self._cursor

    def may_admit(self, version: int) -> bool:
        """Whether target step cursor + 1 lies within the lookahead of `version`."""
        return self._cursor < version + self._lookahead

    def admit(self, mutation: Mutation) -> int:
        """Give out the next target step."""
        mutation.require_live()
        self._cursor += 1
        return self._cursor

    def select(self, ready: Sequence[BufferedGroup], *, version: int, most: int) -> list[BufferedGroup]:
        """Ready groups whose stamp is `version`, in dispatch order."""
        return [group for group in ready if group.target_step == version][:most]

    def evict(self, ready: Sequence[BufferedGroup], *, version: int) -> list[BufferedGroup]:
        """Ready groups whose stamp has passed."""
        return [group for group in ready if group.target_step is None or group.target_step < version]

    def required_capacity(self, num_prompts_per_step: int) -> int:
        """One batch for the current step and one for each version of lookahead."""
        return num_prompts_per_step * (self._lookahead + 1)

    def restore(self, *, name: str, cursor: int, stamps: Sequence[int]) -> None:
        """Continue from a saved cursor."""
        if name != self.name:
            raise RestoreRefused(
                f"the snapshot was made with sampler '{name}', this run uses '{self.name}'; "
                f"set async_rl.sampler to '{name}'"
            )
        highest = max(stamps, default=-1)
        if highest > cursor:
            raise RestoreRefused(
                f"the saved sampler cursor {cursor} does not cover target step {highest} of a restored group; "
                "restore an older snapshot"
            )
        self._cursor = cursor


def build_sampler(config: RunConfig) -> Sampler:
    """The configured sampler. Raises `ConfigurationError` when the buffer can't hold what it needs."""
    sampler = InOrderSampler(max_lookahead_versions=config.async_rl.max_lookahead_versions)
    needed = sampler.required_capacity(config.algorithm.num_prompts_per_step)
    if config.buffer_capacity < needed:
        raise ConfigurationError(
            f"async_rl.buffer_capacity is {config.buffer_capacity}; sampler '{sampler.name}' needs {needed}"
        )
    return sampler
