"""The admission gate of samplers that dispatch one batch for each trainer version."""

from gpu_workers.controller.barrier import Mutation


class VersionGate:
    """Admits while cursor < version + `lookahead`. The cursor counts admitted batches, from -1."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._cursor = -1

    @property
    def cursor(self) -> int:
        """The last admitted batch; -1 before the first."""
        return self._cursor

    def may_admit(self, version: int) -> bool:
        """Whether batch cursor + 1 lies within the lookahead of `version`."""
        return self._cursor < version + self._lookahead

    def required_capacity(self, num_prompts_per_step: int) -> int:
        """One batch for the current step and one for each version of lookahead."""
        return num_prompts_per_step * (self._lookahead + 1)

    def _advance(self, mutation: Mutation) -> int:
        mutation.require_live()
        self._cursor += 1
        return self._cursor
