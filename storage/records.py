"""The vocabulary every layer shares: prompts, groups, siblings and the state a cut captures.

All records are immutable: owners replace them, so that a cut only copies references.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class RecoveryLevel(StrEnum):
    """How much of an unfinished group a restart reuses."""

    PROMPT_GROUP = "prompt_group"
    SIBLING = "sibling"
    TURN = "turn"
    PREFIX = "prefix"

    @property
    def keeps_siblings(self) -> bool:
        """Whether sealed siblings are kept."""
        return self is not RecoveryLevel.PROMPT_GROUP

    @property
    def keeps_turns(self) -> bool:
        """Whether finished turns of running episodes are kept."""
        return self in (RecoveryLevel.TURN, RecoveryLevel.PREFIX)

    @property
    def keeps_tokens(self) -> bool:
        """Whether the tokens of running model calls are kept."""
        return self is RecoveryLevel.PREFIX


class GroupPhase(StrEnum):
    """`reserved` -> `admitted`; only an admitted group can be dispatched."""

    RESERVED = "reserved"
    ADMITTED = "admitted"


class GroupStatus(StrEnum):
    """`generating` -> `ready_to_finalize` -> `finalizing` -> published (leaves the ledger).

    `finalization_unknown`: finalizing failed half-way. The run has stopped and the state is never saved.
    """

    GENERATING = "generating"
    READY_TO_FINALIZE = "ready_to_finalize"
    FINALIZING = "finalizing"
    FINALIZATION_UNKNOWN = "finalization_unknown"


class AttemptStatus(StrEnum):
    """`reserved` -> `dispatched` -> `sealed` | `abandoned` (the next attempt is `reserved` again).

    An attempt whose finished turns or sampled tokens were kept, when a restart or the end of its generator interrupted
    it, is `resumed` until it is dispatched.
    """

    RESERVED = "reserved"
    DISPATCHED = "dispatched"
    RESUMED = "resumed"
    SEALED = "sealed"


class RowKind(StrEnum):
    """The kinds of rows in the data plane; each has its own schema."""

    TRAINING_ROW = "training_rows"
    STAGED_CALL = "staged_calls"
    PARTIAL_TOKENS = "partial_tokens"


@dataclass(frozen=True, slots=True)
class PromptRef:
    """Which prompt: its ordinal in the dataset, the pass over the dataset, and its content hash (sha256 hex)."""

    prompt_id: int
    epoch: int
    content_hash: str

    @property
    def group_id(self) -> str:
        """The id of this prompt's group: stable across retries and restarts."""
        return f"e{self.epoch}-p{self.prompt_id}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with its content: token ids for the model and the task's own JSON for scoring."""

    ref: PromptRef
    token_ids: tuple[int, ...]
    task_json: str


def rollout_id(group_id: str, generation_index: int) -> str:
    """The id of a sibling, and of its training row."""
    return f"{group_id}_g{generation_index}"


def call_key(rollout: str, *, attempt: int, turn: int) -> str:
    """The key of one captured model call in the staging area."""
    return f"{rollout}/a{attempt}/t{turn}"


def partial_key(call: str, *, start: int, end: int) -> str:
    """The id of a row with tokens `start` to `end` (exclusive) of a call that has not ended; `call` is its key."""
    return f"{call}/p{start}-{end}"


def episode_key(rollout: str, attempt: int) -> str:
    """The name of one environment episode; `attempt` is the environment's."""
    return f"{rollout}-a{attempt}"


@dataclass(frozen=True, slots=True)
class SealedSibling:
    """The terminal result of a sibling. Tokens lie in the data plane under `call_keys`."""

    call_keys: tuple[str, ...]
    digests: tuple[str, ...]
    reward: float
    masked: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Sibling:
    """One generation slot: its current attempt, failure counts and, once sealed, its result.

    `resumes`: how often an attempt of it went on with the turns and tokens it had, after a restart or on another
    generator. The environment counts each as an attempt of its own.
    """

    generation_index: int
    attempt: int = 0
    status: AttemptStatus = AttemptStatus.RESERVED
    infrastructure_failures: int = 0
    data_failures: int = 0
    sealed: SealedSibling | None = None
    resumes: int = 0

    @property
    def interruptions(self) -> int:
        """How often a restart interrupted it: attempts that neither failed nor were sealed, and those that went on."""
        return self.attempt - self.infrastructure_failures - self.data_failures + self.resumes

    @property
    def environment_attempt(self) -> int:
        """The environment's number of what runs now or next."""
        return self.attempt + self.resumes


@dataclass(frozen=True, slots=True)
class CallSampling:
    """How the tokens of a model call are drawn: all that must stay the same for it to be continued.

    `kind` is the sampling that drew them: `counter` (noise from seed and position, `counter_sampler`), `positional` (a
    model runner whose own noise is such) or `engine` (a plain engine seed, which can't be continued). `seed` is that
    of the call, in [0, 2**63).
    """

    kind: str
    seed: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartialCall:
    """A model call that has not ended, or whose end has not been recorded: what its continuation needs.

    `turn` is the call's, from 0; its prompt has `prompt_tokens` tokens, whose digest is `schemas.prompt_digest`. Its
    `num_tokens` sampled tokens lie in the data plane as the rows `chunks` (`schemas.PARTIAL_TOKENS`), without gap.
    `finish_reason` is empty while it runs; `stop` or `length` when all its tokens are there.
    """

    rollout_id: str
    attempt: int
    turn: int
    prompt_tokens: int
    prompt_digest: str
    sampling: CallSampling
    chunks: tuple[str, ...]
    num_tokens: int
    finish_reason: str = ""

    @property
    def key(self) -> str:
        """The key that the whole call is staged under once it has ended."""
        return call_key(self.rollout_id, attempt=self.attempt, turn=self.turn)


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One running episode at its newest turn boundary: what an environment exports and continues from.

    `attempt` is the environment's; `turn` counts finished turns, of which `rewards`, `calls` (keys of staged calls) and
    `weight_versions` (the newest of each call) have one entry each. `messages_json` is a JSON list of
    `{"role": "environment" | "policy", "text": …}`, the environment's first. `instance` exported it.
    """

    rollout_id: str
    attempt: int
    instance: str
    environment: str
    version: int
    mode: str
    seed: int
    task_json: str
    task_digest: str
    turn: int
    state_json: str
    state_sha256: str
    messages_json: str
    rewards: tuple[float, ...]
    calls: tuple[str, ...]
    weight_versions: tuple[int, ...]
    deadline_left_s: float
    parked_s: float

    @property
    def row_key(self) -> str:
        """How an environment names this episode."""
        return episode_key(self.rollout_id, self.attempt)


@dataclass(frozen=True, slots=True)
class LedgerGroup:
    """One promised, unfinished prompt group. `batch` numbers the fetch it was reserved in."""

    prompt: PromptRef
    level: RecoveryLevel
    batch: int
    order: int
    siblings: tuple[Sibling, ...]
    phase: GroupPhase = GroupPhase.RESERVED
    status: GroupStatus = GroupStatus.GENERATING
    target_step: int | None = None
    start_version: int | None = None

    @property
    def group_id(self) -> str:
        """Stable id of the group."""
        return self.prompt.group_id


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """A finished group: what its finalization came to. `order` is dispatch order.

    `num_tokens` were sampled; `version_tokens` are those of them that are trained (not in masked rows), by the weight
    version that each was sampled under.
    """

    prompt: PromptRef
    order: int
    target_step: int | None
    start_version: int
    row_ids: tuple[str, ...]
    rewards: tuple[float, ...]
    num_tokens: int
    version_tokens: tuple[tuple[int, int], ...]
    claimed_by: int | None = None

    @property
    def group_id(self) -> str:
        """Stable id of the group."""
        return self.prompt.group_id

    @property
    def oldest_version(self) -> int:
        """The oldest weights that a trained token of the group was sampled under."""
        return min((version for version, _ in self.version_tokens), default=self.start_version)

    @property
    def newest_version(self) -> int:
        """The newest weights that a trained token of the group was sampled under."""
        return max((version for version, _ in self.version_tokens), default=self.start_version)


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group trained since the newest durable checkpoint, with the step that trained it and its place there."""

    step: int
    position: int
    group: BufferedGroup


@dataclass(frozen=True, slots=True)
class DroppedPrompt:
    """A prompt given up on purpose, with the reason; it never comes back."""

    prompt: PromptRef
    reason: str
    target_step: int | None


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Where the prompt source stands: the pass and how many prompts of it were taken."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters and cursors that are saved with every bundle.

    `shortfall` maps a target step to the number of groups that will never arrive for it.
    `stamps` is what was learned from the sampler: True, False or not known yet. Train steps are numbered from 1;
    the batch that step n consumes carries target step n - 1, the trainer's version when it is trained.
    `sampler_cursor` is the highest target step admitted so far, -1 before the first.
    """

    train_steps: int = 0
    trainer_version: int = 0
    source: SourcePosition = SourcePosition()
    sampler: str = "in_order"
    sampler_cursor: int = -1
    stamps: bool | None = None
    next_batch: int = 0
    next_order: int = 0
    shortfall: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Everything a cut captures except the rows: plain records, owned by nobody."""

    progress: Progress
    ledger: tuple[LedgerGroup, ...] = ()
    buffer: tuple[BufferedGroup, ...] = ()
    spares: tuple[PromptRef, ...] = ()
    dropped: tuple[DroppedPrompt, ...] = ()
    trained: tuple[TrainedGroup, ...] = ()
    episodes: tuple[EpisodeRecord, ...] = ()
    partial_calls: tuple[PartialCall, ...] = ()

    @property
    def model_step(self) -> int:
        """The train step of the model this state stands on; its trained groups lead from there to `train_steps`."""
        return min((trained.step for trained in self.trained), default=self.progress.train_steps + 1) - 1

    def row_ids(self) -> dict[str, RowKind]:
        """Ids of every row this state refers to, with their kinds."""
        ids = {row: RowKind.TRAINING_ROW for group in self.buffer for row in group.row_ids}
        ids.update((row, RowKind.TRAINING_ROW) for t in self.trained for row in t.group.row_ids)
        for group in self.ledger:
            for sibling in group.siblings:
                if sibling.sealed is not None:
                    ids.update((key, RowKind.STAGED_CALL) for key in sibling.sealed.call_keys)
        ids.update((key, RowKind.STAGED_CALL) for episode in self.episodes for key in episode.calls)
        ids.update((chunk, RowKind.PARTIAL_TOKENS) for call in self.partial_calls for chunk in call.chunks)
        return ids
