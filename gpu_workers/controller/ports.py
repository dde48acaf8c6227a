"""What the controller needs from the outside: Protocols that real workers and the tests' fakes both obey.

No torch, vLLM, Ray or Prefect here. All calls are asynchronous; none may block the controller's event loop.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from storage.records import Prompt


@dataclass(frozen=True, slots=True)
class SiblingOrder:
    """One sibling to run: its slot and the attempt number this execution carries.

    `environment_attempt` is what its environment calls this execution, `turns` how many finished turns it goes on from,
    and `history` the tokens of those: everything that was asked and sampled up to the last of them.
    """

    generation_index: int
    attempt: int
    environment_attempt: int = 0
    turns: int = 0
    history: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """The unsealed siblings of one group, dispatched together to one generator.

    `instance`: the environment that holds restored episodes of it, if one does.
    """

    group_id: str
    prompt: Prompt
    siblings: tuple[SiblingOrder, ...]
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt: `infrastructure` tells whose fault it is; `message` is the original error.

    `refused`: nothing was begun, because the environment is closed for a checkpoint; the attempt is sent again.
    """

    infrastructure: bool
    message: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class SiblingResult:
    """What one attempt returned: captured calls (`storage.schemas.STAGED_CALLS` rows) and a reward, or a failure.

    `calls` are those that no `TurnResult` brought before. `generation_s` and `environment_s`: seconds of this attempt
    in model calls and in environment turns, scoring included.
    """

    generation_index: int
    attempt: int
    calls: pa.RecordBatch | None = None
    reward: float = 0.0
    masked: bool = False
    failure: Failure | None = None
    generation_s: float = 0.0
    environment_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnResult:
    """A finished turn of a running attempt: its captured call, one row of `storage.schemas.STAGED_CALLS`."""

    generation_index: int
    attempt: int
    calls: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Weights that generators can load: a safetensors file (or another transport's name) and their version."""

    version: int
    location: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an optimizer step reports. Metrics are plain floats; hashes are sha256 hex."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    weights_sha256: str = ""


class Generator(Protocol):
    """All generators of the run behind one object; it chooses where a group runs."""

    def generate(self, order: GroupOrder) -> AsyncGenerator[SiblingResult | TurnResult, None]:
        """Run the group; yield each turn and each sibling as soon as it is finished. Failures are results, unless
        the whole call failed (`InfrastructureFailure`). The caller closes the generator, even half-way."""
        ...

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        """Give all engines new weights. Running calls go on. Returns timings in seconds."""
        ...

    async def abort(self, group_id: str) -> None:
        """Stop a group's running calls; unknown groups are ignored."""
        ...


class Trainer(Protocol):
    """All trainer ranks behind one object."""

    async def begin_step(self, step: int) -> None:
        """Start (or start again) the accumulation of gradients for `step`; nothing irreversible."""
        ...

    async def train_microbatch(self, rows: Sequence[pa.RecordBatch]) -> Mapping[str, float]:
        """Accumulate gradients of whole groups (`storage.schemas.TRAINING_ROWS`), in this order."""
        ...

    async def flush_microbatches(self) -> None:
        """Compute what still waits for a full forward pass, so that `finish_step` is short."""
        ...

    async def finish_step(self, step: int) -> StepResult:
        """Clip and apply the optimizer step. The first irreversible act."""
        ...

    async def publish_weights(self, version: int) -> WeightsRef:
        """Write the current weights where generators can load them."""
        ...

    async def begin_save(self, prefix: str) -> None:
        """Copy model, optimizer and RNG, begin to write them to the store below `prefix`; steps may go on at once."""
        ...

    async def finish_save(self, prefix: str) -> Sequence[Mapping[str, Any]]:
        """Wait until all ranks have written what `begin_save` copied, beside other calls; returns file entries as plain
        dicts (`path`, `bytes`, `sha256`, `role`). Raises what a rank failed with."""
        ...

    async def restore(self, files: Sequence[Mapping[str, Any]] | None) -> None:
        """Load model, optimizer and RNG from the store's checkpoint files (verified against their sha256), or,
        with None, go back to the initial model."""
        ...


class Trace(Protocol):
    """The rollout trace: facts, never a reason to fail."""

    def record(self, event: str, **fields: Any) -> None:
        """Append one event; returns at once and never raises."""
        ...
