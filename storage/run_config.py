"""The whole configuration of a run: frozen, documented where it is declared, refusing unknown keys.

One `RunConfig` is the YAML file of `midflight train`, the parameter form in the Prefect UI, and part of every
manifest. It imports neither torch nor vLLM nor Ray.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from storage.algorithm_config import AlgorithmConfig
from storage.async_rl_config import AsyncRlConfig
from storage.checkpointing_config import CheckpointingConfig
from storage.config_section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from storage.records import RecoveryLevel
from storage.refused_sampling import refuse_sampling


class DataConfig(Section):
    """The prompts."""

    task: str = Field("sort8", description="A task, or an environment by name or import path (docs/environments.md).")
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
    max_generator_restarts: NonNegativeInt = Field(
        5,
        description="Restarts of a generator that died, in a row and without a finished group between them, before it "
        "is given up. The pauses between them are those of async_rl.retry_backoff_s.",
    )
    max_new_tokens: PositiveInt = Field(16, description="Most tokens of one completion.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling mass.")
    seeding: Literal["counter", "engine"] = Field(
        "counter",
        description="Where the noise of sampling comes from, always seeded by the run's seed, the prompt, the sibling "
        "and the turn. 'counter': from seed and position, so that a call can be continued from its tokens so far; "
        "'engine': vLLM's own seeded sampling on whatever model runner it chooses, which can repeat a call but not "
        "continue it (rollout_recovery up to level 'turn').",
    )
    max_inflight_groups: PositiveInt = Field(32, description="Prompt groups running at once, over all engines.")
    max_num_seqs: PositiveInt = Field(256, description="Most sequences one engine decodes together.")
    max_model_len: PositiveInt = Field(64, description="Longest sequence, prompt and completion, in tokens.")
    kv_cache_bytes: PositiveInt = Field(64 << 20, description="KV cache of one engine, in bytes (CPU).")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(0.85, description="vLLM's share of a GPU.")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs of one engine.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_sampling(cls, given: Any) -> Any:
        refuse_sampling(given if isinstance(given, Mapping) else {})
        return given


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
        description="'prompt_group': nothing of unfinished groups; 'sibling': sealed siblings; 'turn': also the "
        "finished turns of running episodes of a multi-turn environment; 'prefix': also the tokens so far of running "
        "model calls, which are continued.",
    )
    peek_interval_s: PositiveFloat = Field(
        5.0,
        description="prefix: seconds between looks at the running calls of all generators, besides the one before each "
        "snapshot. A generator whose machine is lost loses the tokens since the last one.",
    )
    peek_deadline_s: PositiveFloat = Field(
        2.0,
        description="prefix: longest time that a look at the running calls may hold a snapshot up. A generator that "
        "does not answer by then keeps what is known of its calls.",
    )
    per_task: dict[str, RecoveryLevel] = Field(
        {}, description="Other levels for tasks: data.task, without what follows a '?', to a level."
    )
    per_agent: dict[str, RecoveryLevel] = Field(
        {},
        description="Other levels for agents, which precede per_task: the environment's name, or the name in a Gym "
        "row's agent_ref, to a level.",
    )

    def level_of(self, task: str, agent: str) -> RecoveryLevel:
        """The level of a group that is reserved now: of its agent, else of its task (`data.task`), else the usual."""
        usual = self.per_task.get(task.partition("?")[0], self.target_level)
        return self.per_agent.get(agent, usual)

    def uses(self, level: RecoveryLevel) -> bool:
        """Whether any group may be reserved at this level."""
        return level in (self.target_level, *self.per_task.values(), *self.per_agent.values())


class EnvironmentConfig(Section):
    """Multi-turn environments, which data.task names."""

    servers: tuple[str, ...] = Field(
        (),
        description="URLs of environment servers (gpu_workers.environments.http_server) that hold the episodes; empty: "
        "the generators hold them. The bearer token is MIDFLIGHT_ENVIRONMENT_TOKEN, in the environment of flow "
        "and workers.",
    )
    gym_agents: dict[str, str] = Field(
        {},
        description="URLs of the agents or environment servers of a NeMo Gym, by the names that the rows of "
        "data.task 'gym:<file>' give them; their /run plays whole rollouts. The same bearer token.",
    )
    gym_model_host: str = Field(
        "127.0.0.1", description="Where the generator answers a Gym's model calls; not loopback: only with a token."
    )
    gym_model_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        8901, description="Its port: http://<host>:<port>/v1 is the base URL for the Gym's model server."
    )
    deadline_s: PositiveFloat = Field(
        20.0, description="Deadline of each phase of an environment checkpoint: prepare, commit, restore."
    )
    lease_grace_s: PositiveFloat = Field(
        30.0, description="An environment that is closed and hears nothing for so long after a deadline opens itself."
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
    max_resumes: NonNegativeInt = Field(
        3,
        description="How often in a row a `train` flow run that crashed, or lost its runtime, is started again by "
        "itself without having published a new bundle; 0: never.",
    )
    grace_s: PositiveFloat = Field(
        20.0,
        description="Longest time between a preemption notice (SIGTERM) or a cancel and the end of the runtime, for a "
        "last snapshot. Prefect itself kills a cancelled flow run after 30 s.",
    )


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
    environment: EnvironmentConfig = EnvironmentConfig()
    store: StoreConfig = StoreConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def buffer_capacity(self) -> int | None:
        """Most groups in buffer and flight together; None: no bound, or a custom sampler's own."""
        return self.async_rl.buffer_capacity or self._needed_capacity()

    def _needed_capacity(self) -> int | None:
        ahead = self.async_rl.batches_ahead
        return None if ahead is None else self.algorithm.num_prompts_per_step * (ahead + 1)

    def lookahead_versions(self, version: int) -> int:
        """How far dispatch may run ahead of generators at `version`, in train steps.

        While the critic warms up (N = algorithm.policy_training_start_step) weights do not change, so that it may be
        `warmup_lookahead_versions`. Towards its end the window closes again: no batch dispatched before version N is
        meant for a step after N + `max_lookahead_versions`, so that none is trained more updates late than usual.
        """
        usual, warmup = self.async_rl.max_lookahead_versions, self.async_rl.warmup_lookahead_versions
        left = self.algorithm.policy_training_start_step - version
        return usual if warmup is None or left <= 0 else max(usual, min(warmup, left + usual))

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        self._refuse_needless_warmup()
        self._refuse_seeds_that_cannot_continue()
        self._refuse_lack_of_room()
        self._refuse_chunks_beyond_a_step()
        if self.data.num_prompts < self.algorithm.num_prompts_per_step:
            raise ValueError(
                f"data.num_prompts is {self.data.num_prompts}, less than algorithm.num_prompts_per_step "
                f"{self.algorithm.num_prompts_per_step}: no step could ever be filled"
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

    def _refuse_seeds_that_cannot_continue(self) -> None:
        if self.generation.seeding == "engine" and self.rollout_recovery.uses(RecoveryLevel.PREFIX):
            raise ValueError(
                "generation.seeding is 'engine', but rollout_recovery (target_level, per_task or per_agent) asks for "
                "level 'prefix': the engine's own seeds can't go on in the middle of a response, so that its tokens so "
                "far would be kept for nothing; set generation.seeding to 'counter', or the level to 'turn'"
            )

    def _refuse_lack_of_room(self) -> None:
        given, step_size = self.async_rl.buffer_capacity, self.algorithm.num_prompts_per_step
        needed = self._needed_capacity() or step_size
        if given is not None and given < needed:
            raise ValueError(
                f"async_rl.buffer_capacity is {given}, but sampler {self.async_rl.sampler} needs {needed} "
                f"({needed // step_size} x algorithm.num_prompts_per_step {step_size})"
            )

    def _refuse_chunks_beyond_a_step(self) -> None:
        chunk, step_size = self.async_rl.min_groups_for_streaming_train, self.algorithm.num_prompts_per_step
        if chunk is not None and chunk > step_size:
            raise ValueError(
                f"async_rl.min_groups_for_streaming_train is {chunk}, more than algorithm.num_prompts_per_step "
                f"{step_size}: no chunk could ever be filled; lower it, or leave it out to train whole batches"
            )

    def _refuse_needless_warmup(self) -> None:
        warmup, usual = self.async_rl.warmup_lookahead_versions, self.async_rl.max_lookahead_versions
        if warmup is None:
            return
        if self.algorithm.policy_training_start_step == 0:
            raise ValueError(
                f"async_rl.warmup_lookahead_versions is {warmup}, but no critic warms up: "
                "algorithm.policy_training_start_step is 0; remove the one, or raise the other (algorithm.kind 'ppo')"
            )
        if warmup < usual:
            raise ValueError(
                f"async_rl.warmup_lookahead_versions is {warmup}, less than async_rl.max_lookahead_versions {usual}; "
                "it is meant to run further ahead than usual"
            )
