"""What the controller needs from the outside: Protocols that real workers and the tests' fakes both obey.

No torch, vLLM, Ray or Prefect here. All calls are asynchronous; none may block the controller's event loop.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.records import CallSampling, EpisodeRecord, Prompt


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens of one model call: int32 ids, float32 log-probabilities, and spans of weight versions over them.

    `version_starts[i]` is the index, among these tokens, of the first one of `versions[i]`.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version_starts: tuple[int, ...]
    versions: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The tokens that a model call had when it was interrupted; it is issued again as its prompt and these.

    Whoever continues it compares digest and sampling with its own, and samples anew where they differ.
    """

    turn: int
    prompt_digest: str
    sampling: CallSampling
    sampled: SampledTokens


@dataclass(frozen=True, slots=True)
class SiblingOrder:
    """One sibling to run: its slot and the attempt number this execution carries.

    `environment_attempt` is what its environment calls this execution, `turns` how many finished turns it goes on from,
    and `history` the tokens of those: everything that was asked and sampled up to the last of them. `partial`: what
    there is of the call of the turn after those. `episode`: how it stood behind them, for an environment that does not
    have it any more.
    """

    generation_index: int
    attempt: int
    environment_attempt: int = 0
    turns: int = 0
    history: tuple[int, ...] = ()
    partial: PartialCompletion | None = field(default=None, compare=False)
    episode: EpisodeRecord | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """The unsealed siblings of one group, dispatched together to one generator.

    `instance`: the environment that holds restored episodes of it, if one does. `keeps_running`: its running attempts
    are to survive their generator, so that each finished turn is reported with its episode.
    """

    group_id: str
    prompt: Prompt
    siblings: tuple[SiblingOrder, ...]
    instance: str | None = None
    keeps_running: bool = False


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
    """A finished turn of a running attempt: its captured call, one row of `storage.schemas.STAGED_CALLS`.

    `episode`: how it stands behind this turn, where the order asks for it.
    """

    generation_index: int
    attempt: int
    calls: pa.RecordBatch
    episode: EpisodeRecord | None = None


@dataclass(frozen=True, slots=True)
class DiscardedPartial:
    """A generator that was given the `tokens` of a call could not continue them, and samples the call anew."""

    generation_index: int
    attempt: int
    tokens: int
    reason: str


# What a running group reports: turns and discarded partials any number of times, each sibling once.
RolloutResult = SiblingResult | TurnResult | DiscardedPartial


@dataclass(frozen=True, slots=True)
class KnownCall:
    """What the controller holds of a sibling's running call: `tokens` of the call of `turn`. `environment_attempt`
    names the execution that is current; calls of others are not asked for.
    """

    environment_attempt: int
    turn: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class PeekedCall:
    """A running model call (or one whose end has not been delivered) as a generator found it.

    `sampled` are the call's tokens from index `start` on: those beyond what the controller knew of this very call, or
    all. `finish_reason` is empty while it runs.
    """

    rollout_id: str
    attempt: int
    environment_attempt: int
    turn: int
    prompt_tokens: int
    prompt_digest: str
    sampling: CallSampling
    start: int
    sampled: SampledTokens
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Peek:
    """What generators hold of the rollouts they were asked for. `unreadable`: by rollout, why a call that runs there
    can't be read or could not be continued (it is run again from its last turn).
    """

    calls: tuple[PeekedCall, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)


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

    def generate(self, order: GroupOrder) -> AsyncGenerator[RolloutResult, None]:
        """Run the group; yield each turn and each sibling as soon as it is finished. Failures are results, unless
        the whole call failed (`InfrastructureFailure`). The caller closes the generator, even half-way."""
        ...

    async def peek(self, wanted: Mapping[str, KnownCall]) -> Peek:
        """The tokens so far of the running calls of these rollouts, without disturbing them; of a generator that has
        just died those that it still had. Never raises for a generator that does not answer: its calls are missing.
        """
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
