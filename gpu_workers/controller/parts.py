"""What the pumps, the snapshotter and the restorer share: finished parts, and the one state that they change."""

from collections import deque
from dataclasses import dataclass, field

from gpu_workers.controller.barrier import Cut, DataPlaneBarrier
from gpu_workers.controller.counted_trace import CountedTrace
from gpu_workers.controller.partial_calls import PartialCalls
from gpu_workers.controller.prompt_source import Dataset, PromptSource
from gpu_workers.controller.recorded_steps import RecordedSteps
from gpu_workers.controller.recovery_ledger import RecoveryLedger
from gpu_workers.controller.replay_buffer import ReplayBuffer
from gpu_workers.controller.row_store import DataPlane, RowStore
from gpu_workers.controller.samplers.build import build_sampler
from gpu_workers.controller.samplers.protocol import Sampler
from gpu_workers.controller.signal import Signal
from storage.records import DroppedPrompt, Progress, PromptRef, RecoveryLevel
from storage.run_config import RunConfig


@dataclass(slots=True)
class RolloutRuntimeState:
    """State that pumps change and every checkpoint saves, plus what the loops wait for.

    `generator_version` is the weight version the generators hold; dispatch is gated on it, so that with lookahead 0
    no token is sampled from weights that are about to be replaced. `failure` ends the run.

    After a restore the trainer may stand before `restored_step`, which the rollout state belongs to: the steps in
    between are `recorded` and are trained again first. Nothing is dispatched before the generators have caught up, or
    while the environment is closed for a checkpoint.
    """

    train_steps: int = 0
    trainer_version: int = 0
    generator_version: int = 0
    stamps: bool | None = None
    next_batch: int = 0
    next_order: int = 0
    shortfall: dict[int, int] = field(default_factory=dict)
    spares: deque[PromptRef] = field(default_factory=deque)
    dropped: list[DroppedPrompt] = field(default_factory=list)
    recorded: RecordedSteps = field(default_factory=RecordedSteps)
    restored_step: int = 0
    environment_closed: bool = False
    in_commit_window: bool = False
    parked: bool = False
    failure: BaseException | None = None
    changed: Signal = field(default_factory=Signal)

    @property
    def rollout_step(self) -> int:
        """The train step that ledger, buffer and sampler stand at: the trainer's, or the last recorded one."""
        return max(self.train_steps, self.recorded.last)

    @property
    def has_caught_up(self) -> bool:
        """Whether nothing is left to be trained again, and the generators hold the weights that dispatch goes by."""
        return self.generator_version >= self.restored_step

    def fail(self, error: BaseException) -> None:
        """Remember the first failure that ends the run and wake everybody."""
        if self.failure is None:
            self.failure = error
        self.changed.notify()


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """The parts of one controller; of these only `state` is written by more than its owner."""

    config: RunConfig
    source: PromptSource
    sampler: Sampler
    ledger: RecoveryLedger
    buffer: ReplayBuffer
    rows: DataPlane
    partial_calls: PartialCalls
    barrier: DataPlaneBarrier
    trace: CountedTrace
    state: RolloutRuntimeState

    @classmethod
    def empty(cls, config: RunConfig, dataset: Dataset, trace: CountedTrace) -> "RolloutParts":
        """Those of a run that stands at the beginning of its data."""
        data, ledger = config.data, RecoveryLedger()
        return cls(
            config=config,
            source=PromptSource(dataset, num_epochs=data.num_epochs, seed=data.seed, shuffle=data.shuffle),
            sampler=build_sampler(config),
            ledger=ledger,
            buffer=ReplayBuffer(),
            rows=RowStore(),
            partial_calls=PartialCalls(ledger),
            barrier=DataPlaneBarrier(),
            trace=trace,
            state=RolloutRuntimeState(),
        )

    def level_of(self, prompt: PromptRef) -> RecoveryLevel:
        """What a restart would reuse of this prompt's group, if it were reserved now."""
        agent = self.source.dataset.agent(prompt.prompt_id)
        return self.config.rollout_recovery.level_of(self.config.data.task, agent)

    def progress(self, cut: Cut) -> Progress:
        """Counters and cursors as they are under this cut."""
        cut.require_live()
        state = self.state
        return Progress(
            train_steps=state.rollout_step,
            trainer_version=state.rollout_step,
            source=self.source.position,
            sampler=self.sampler.name,
            sampler_cursor=self.sampler.cursor,
            stamps=state.stamps,
            next_batch=state.next_batch,
            next_order=state.next_order,
            shortfall=dict(state.shortfall),
        )
