"""The whole configuration of a run: frozen, documented where it is declared, refusing unknown keys.

One `RunConfig` is the YAML file of `midflight train`, the parameter form in the Prefect UI, and part of every
manifest. It imports neither torch nor vLLM nor Ray.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.records import RecoveryLevel

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_SAMPLER_LIMITS = {
    "max_lookahead_versions": ("in_order", "custom"),
    "max_staleness_versions": ("weight_fifo", "ready_first", "windowed", "custom"),
}


class Section(BaseModel):
    """Base of all sections: immutable and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class AlgorithmConfig(Section):
    """The policy-gradient algorithm and its optimizer."""

    kind: Literal["grpo"] = Field("grpo", description="Algorithm.")
    max_steps: PositiveInt = Field(100, description="Train steps of the run.")
    num_prompts_per_step: PositiveInt = Field(16, description="Prompt groups that one optimizer step consumes.")
    num_generations_per_prompt: Annotated[int, Field(ge=2)] = Field(
        8, description="Completions per prompt: the group of the advantage baseline."
    )
    learning_rate: PositiveFloat = Field(3e-4, description="AdamW learning rate.")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW weight decay.")
    max_gradient_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this norm.")
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="The ratio is clipped below 1 - clip_low.")
    clip_high: PositiveFloat = Field(0.28, description="The ratio is clipped above 1 + clip_high.")
    importance_weight_cap: PositiveFloat = Field(
        2.0, description="Truncation of the generator-trainer importance weight."
    )
    divide_by_standard_deviation: bool = Field(True, description="Divide advantages by their group's deviation.")
    microbatch_rows: PositiveInt = Field(64, description="Rows of one forward and backward pass.")


class DataConfig(Section):
    """The prompts."""

    task: str = Field("sort8", description="Name of a registered task.")
    num_prompts: PositiveInt = Field(4096, description="Prompts in the dataset.")
    num_epochs: PositiveInt = Field(1, description="Passes over the dataset.")
    seed: NonNegativeInt = Field(17, description="Seed of the procedural task and of the order of prompts.")
    shuffle: bool = Field(True, description="Visit prompts in a seeded order, another one in each epoch.")


class PolicyConfig(Section):
    """The model that is trained."""

    model: str = Field("tiny", description="'tiny' (made and warmed up at set-up) or the path of a Hugging Face model.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Parameter type in trainer and generators.")
    hidden_size: PositiveInt = Field(128, description="Hidden size of the tiny model.")
    num_layers: PositiveInt = Field(2, description="Layers of the tiny model.")
    tie_word_embeddings: bool = Field(True, description="Whether the tiny model shares embedding and output weights.")
    warm_start_steps: NonNegativeInt = Field(400, description="Supervised steps on noisy demonstrations.")
    warm_start_noise: Annotated[float, Field(ge=0, le=1)] = Field(0.12, description="Noise of the demonstrations.")


class GenerationConfig(Section):
    """Sampling and the engines."""

    num_engines: PositiveInt = Field(1, description="Generator actors, one vLLM engine each.")
    max_new_tokens: PositiveInt = Field(16, description="Most tokens of one completion.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling mass.")
    max_inflight_groups: PositiveInt = Field(32, description="Prompt groups running at once, over all engines.")
    max_num_seqs: PositiveInt = Field(256, description="Most sequences one engine decodes together.")
    max_model_len: PositiveInt = Field(64, description="Longest sequence, prompt and completion, in tokens.")
    kv_cache_bytes: PositiveInt = Field(64 << 20, description="KV cache of one engine, in bytes (CPU).")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(0.85, description="vLLM's share of a GPU.")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs of one engine.")


class AsyncRlConfig(Section):
    """How far generation may run ahead, and what happens when rollouts fail."""

    sampler: Literal["in_order", "weight_fifo", "ready_first", "windowed", "custom"] = Field(
        "in_order", description="When batches are dispatched, and which finished groups a train step takes."
    )
    max_lookahead_versions: NonNegativeInt = Field(
        1, description="in_order: steps that may be dispatched beyond the one being trained. 0 is synchronous."
    )
    max_staleness_versions: NonNegativeInt = Field(
        1,
        description="weight_fifo, ready_first: batches that may be dispatched beyond the step being trained. "
        "weight_fifo, windowed: versions by which a group's start may lie behind the trainer; older ones are given up.",
    )
    freshest_first: bool = Field(False, description="windowed: take the newest start version first.")
    custom_sampler: str | None = Field(
        None, description="custom: import path of the sampler's class, such as 'team.samplers:ShortestFirst'."
    )
    buffer_capacity: PositiveInt | None = Field(
        None,
        description="Most groups in buffer and flight. By default what the sampler needs: num_prompts_per_step x "
        "(lookahead or staleness + 1), and no bound for windowed.",
    )
    max_infrastructure_failures: NonNegativeInt = Field(5, description="Infrastructure failures a sibling survives.")
    max_data_failures: NonNegativeInt = Field(1, description="Data failures a sibling survives.")
    retry_backoff_s: PositiveFloat = Field(0.5, description="First pause after an infrastructure failure; it doubles.")
    retry_backoff_max_s: PositiveFloat = Field(30.0, description="Longest pause between infrastructure retries.")
    rollout_timeout_s: PositiveFloat = Field(600.0, description="Deadline of one attempt.")
    on_dropped_prompt: Literal["shrink", "replace"] = Field(
        "replace", description="A group that is given up is replaced by a spare prompt, or its step shrinks."
    )
    max_skipped_prompts: NonNegativeInt = Field(16, description="Prompts a run may give up before it fails.")
    spare_prompts: NonNegativeInt = Field(4, description="Prompts kept in hand to replace groups that are given up.")
    min_step_batch_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="Smallest share of num_prompts_per_step that a step may shrink to."
    )


class CheckpointingConfig(Section):
    """Trainer checkpoints and what a resumed run starts from."""

    save_period: PositiveInt = Field(1, description="Train steps between trainer checkpoints.")
    keep: PositiveInt = Field(3, description="Newest trainer checkpoints that retention keeps.")
    save_data_plane: bool = Field(True, description="Trainer checkpoints hold the replay buffer's rows too.")
    restore_mode: Literal["latest", "trainer_checkpoint"] = Field(
        "latest", description="'trainer_checkpoint' ignores rollout snapshots."
    )
    allow_older: bool = Field(True, description="Pass over an invalid bundle and restore an older one (reported).")
    load_replay_buffer: bool = Field(
        True, description="False: saved groups are checked, then their prompts are generated again."
    )


class RolloutCheckpointingConfig(Section):
    """Rollout snapshots between trainer checkpoints."""

    enabled: bool = Field(True, description="Take rollout snapshots.")
    interval_s: PositiveFloat = Field(5.0, description="Seconds between snapshot attempts.")
    keep_per_anchor: PositiveInt = Field(2, description="Newest snapshots kept for each anchor.")
    max_consecutive_failures: PositiveInt = Field(3, description="Failed attempts in a row that end the run.")
    trace: bool = Field(True, description="Write the rollout trace.")


class RolloutRecoveryConfig(Section):
    """What a restart reuses."""

    target_level: RecoveryLevel = Field(
        RecoveryLevel.SIBLING,
        description="'prompt_group': nothing of unfinished groups; 'sibling': sealed siblings.",
    )


class StoreConfig(Section):
    """Where runs are kept."""

    url: str = Field(".midflight/store", description="Folder or fsspec URL that holds all runs.")
    deadline_s: PositiveFloat = Field(60.0, description="Deadline of one store call.")


class ClusterConfig(Section):
    """Workers and how long a runtime outlives its driver. The same code runs on one box and on GPU nodes."""

    device: Literal["cpu", "gpu"] = Field("cpu", description="Where generators and trainers run.")
    cpus_per_generator: NonNegativeInt = Field(0, description="Ray CPUs of a generator; 0 shares the machine.")
    gpus_per_generator: Annotated[float, Field(ge=0)] = Field(0, description="GPUs of a generator actor.")
    cpus_per_trainer: NonNegativeInt = Field(0, description="Ray CPUs of a trainer rank; 0 shares the machine.")
    gpus_per_trainer: Annotated[float, Field(ge=0)] = Field(0, description="GPUs of a trainer rank.")
    num_trainers: PositiveInt = Field(1, description="Trainer ranks.")
    driver_lease_s: PositiveFloat = Field(60.0, description="Silence of the driver after which the pumps are parked.")
    driver_ttl_s: PositiveFloat = Field(900.0, description="Silence of the driver after which the runtime ends.")


class RunConfig(Section):
    """One run, whole."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = Field(
        description="Name of the run: its folder in the store and its Ray namespace."
    )
    seed: NonNegativeInt = Field(1, description="Seed of sampling, model and optimizer.")
    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig = DataConfig()
    policy: PolicyConfig = PolicyConfig()
    generation: GenerationConfig = GenerationConfig()
    async_rl: AsyncRlConfig = AsyncRlConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    rollout_checkpointing: RolloutCheckpointingConfig = RolloutCheckpointingConfig()
    rollout_recovery: RolloutRecoveryConfig = RolloutRecoveryConfig()
    store: StoreConfig = StoreConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def buffer_capacity(self) -> int | None:
        """Most groups in buffer and flight together; None: no bound, or a custom sampler's own."""
        return self.async_rl.buffer_capacity or self._needed_capacity()

    def _needed_capacity(self) -> int | None:
        """What a sampler that dispatches one batch for each version needs."""
        limits = self.async_rl
        match limits.sampler:
            case "in_order":
                return self.algorithm.num_prompts_per_step * (limits.max_lookahead_versions + 1)
            case "weight_fifo" | "ready_first":
                return self.algorithm.num_prompts_per_step * (limits.max_staleness_versions + 1)
            case _:
                return None

    @model_validator(mode="after")
    def _refuse_sampler_without_room(self) -> Self:
        given, step_size = self.async_rl.buffer_capacity, self.algorithm.num_prompts_per_step
        needed = self._needed_capacity() or step_size
        if given is not None and given < needed:
            raise ValueError(
                f"async_rl.buffer_capacity is {given}, but sampler {self.async_rl.sampler} needs {needed} "
                f"({needed // step_size} x algorithm.num_prompts_per_step {step_size})"
            )
        return self

    @model_validator(mode="after")
    def _refuse_options_of_other_samplers(self) -> Self:
        """An option that would do nothing was meant for another sampler."""
        limits, sampler = self.async_rl, self.async_rl.sampler
        if (sampler == "custom") != (limits.custom_sampler is not None):
            raise ValueError(
                f"async_rl.sampler is {sampler} and async_rl.custom_sampler is {limits.custom_sampler!r}; a sampler of "
                "your own needs both, 'custom' and 'package.module:Class'"
            )
        if limits.custom_sampler is not None and not _IMPORT_PATH.fullmatch(limits.custom_sampler):
            raise ValueError(f"async_rl.custom_sampler is {limits.custom_sampler!r}; expected package.module:Class")
        if limits.freshest_first and sampler not in ("windowed", "custom"):
            raise ValueError(f"async_rl.freshest_first has no effect on sampler {sampler}; it belongs to windowed")
        for option, users in _SAMPLER_LIMITS.items():
            value, unset = getattr(limits, option), AsyncRlConfig.model_fields[option].default
            if value != unset and sampler not in users:
                other = next(name for name in _SAMPLER_LIMITS if name != option)
                raise ValueError(
                    f"async_rl.{option} is {value}, but sampler {sampler} is bounded by async_rl.{other}; "
                    f"set async_rl.{other} to {value} and leave {option} out"
                )
        return self

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.data.num_prompts < self.algorithm.num_prompts_per_step:
            raise ValueError(
                f"data.num_prompts is {self.data.num_prompts}, less than algorithm.num_prompts_per_step "
                f"{self.algorithm.num_prompts_per_step}: no step could ever be filled"
            )
        if self.algorithm.importance_weight_cap < 1 + self.algorithm.clip_high:
            raise ValueError(
                f"algorithm.importance_weight_cap {self.algorithm.importance_weight_cap} is less than "
                f"1 + algorithm.clip_high {self.algorithm.clip_high}: the cap would act before the clipping"
            )
        if self.generation.max_new_tokens >= self.generation.max_model_len:
            raise ValueError(
                f"generation.max_new_tokens {self.generation.max_new_tokens} leaves no room for a prompt in "
                f"generation.max_model_len {self.generation.max_model_len}"
            )
        if self.async_rl.retry_backoff_max_s < self.async_rl.retry_backoff_s:
            raise ValueError("async_rl.retry_backoff_max_s is less than async_rl.retry_backoff_s")
        if self.cluster.driver_ttl_s < self.cluster.driver_lease_s:
            raise ValueError("cluster.driver_ttl_s is less than cluster.driver_lease_s")
        return self
