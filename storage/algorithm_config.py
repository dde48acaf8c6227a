"""The `algorithm` section of a run's configuration: GRPO and PPO, their options, and which of them contradict."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from storage.config_section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share

LossNormalization = Literal["token_mean", "sequence_mean", "constant_length"]
KlEstimator = Literal["k1", "k2", "k3"]
ImportanceCorrection = Literal["token", "sequence", "none"]
Baseline = Literal["group_mean", "leave_one_out"]
Beta = Annotated[float, Field(ge=0, lt=1)]

GRPO_ONLY = ("baseline", "divide_by_standard_deviation", "filter_equal_rewards")
PPO_ONLY = ("policy_training_start_step", "critic")


class CriticConfig(Section):
    """The critic of PPO: a copy of the initial model with a value head, trained by its own optimizer."""

    learning_rate: PositiveFloat = Field(1e-3, description="AdamW learning rate of the critic.")
    max_gradient_norm: PositiveFloat = Field(1.0, description="The critic's gradients are clipped to this norm.")
    num_epochs: PositiveInt | None = Field(
        None, description="How often a train step visits each of its rows for the critic; null: algorithm.num_epochs."
    )
    gamma: Share = Field(1.0, description="Discount from one sampled token to the next.")
    gae_lambda: Share = Field(0.95, description="Lambda of generalized advantage estimation.")
    value_clip: PositiveFloat | None = Field(
        0.2,
        description="Values count in the loss only up to this distance from those before the step; null: no clipping.",
    )
    normalize_advantages: bool = Field(
        True, description="Advantages of a step get mean 0 and standard deviation 1 over its trained tokens."
    )
    bootstrap_truncated: bool = Field(
        False,
        description="A completion cut off at its token limit goes on with the critic's value of its end; "
        "false: its reward is all there is.",
    )


class AlgorithmConfig(Section):
    """The policy-gradient algorithm and its optimizer."""

    kind: Literal["grpo", "ppo"] = Field(
        "grpo", description="'grpo': advantages from the rewards of a group; 'ppo': from a critic."
    )
    max_steps: PositiveInt = Field(100, description="Train steps of the run.")
    num_prompts_per_step: PositiveInt = Field(16, description="Prompt groups that one train step consumes.")
    num_generations_per_prompt: PositiveInt = Field(
        8, description="Completions per prompt: the group of the advantage baseline. At least 2 for grpo."
    )
    learning_rate: PositiveFloat = Field(3e-4, description="AdamW learning rate.")
    adam_betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW betas, also the critic's.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW weight decay, also the critic's.")
    max_gradient_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this norm.")
    num_epochs: PositiveInt = Field(1, description="How often a train step visits each of its rows.")
    num_minibatches: PositiveInt = Field(
        1, description="Optimizer updates of one such visit; rows are shuffled if there are several."
    )
    microbatch_rows: PositiveInt = Field(64, description="Rows of one forward and backward pass.")
    baseline: Baseline = Field(
        "group_mean", description="What grpo subtracts from a reward: its group's mean, or that of the other members."
    )
    divide_by_standard_deviation: bool = Field(
        True, description="grpo divides advantages by the standard deviation of their group's rewards."
    )
    filter_equal_rewards: bool = Field(
        True,
        description="grpo leaves groups of equal rewards out of the loss; false: they count in its normalization "
        "and get the KL penalty and the entropy bonus.",
    )
    mask_truncated: bool = Field(
        False,
        description="Completions cut off at their token limit count in the baseline but not in the loss "
        "(overlong masking).",
    )
    loss_normalization: LossNormalization = Field(
        "token_mean",
        description="The loss is a mean over tokens, over sequences of their token means, or over sequences of their "
        "token sums divided by one constant length.",
    )
    normalization_length: PositiveInt | None = Field(
        None, description="The length of 'constant_length'; by default generation.max_new_tokens."
    )
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="The ratio is clipped below 1 - clip_low.")
    clip_high: PositiveFloat = Field(0.28, description="The ratio is clipped above 1 + clip_high.")
    clip_reference: Literal["generator", "trainer"] = Field(
        "generator",
        description="The ratio's denominator: the generator's recorded probabilities, or the trainer's own before the "
        "step's first update.",
    )
    importance_correction: ImportanceCorrection = Field(
        "token",
        description="Weights for what generator and trainer disagree on: per token, per sequence (with clip_reference "
        "'trainer'), or none.",
    )
    importance_weight_cap: PositiveFloat = Field(2.0, description="Importance weights are truncated at this value.")
    kl_coefficient: NonNegativeFloat = Field(
        0.0,
        description="Weight of the KL penalty towards the initial model; above 0 trainers keep a frozen copy of it.",
    )
    kl_estimator: KlEstimator = Field("k3", description="Estimator of that divergence.")
    entropy_coefficient: NonNegativeFloat = Field(0.0, description="Weight of the entropy bonus.")
    policy_training_start_step: NonNegativeInt = Field(
        0, description="ppo trains only the critic in the first so many steps (critic warm-up)."
    )
    critic: CriticConfig = CriticConfig()

    @property
    def updates_once(self) -> bool:
        """Whether a train step is a single optimizer update."""
        return self.num_epochs == 1 and self.num_minibatches == 1

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for problem in (*self._kind_problems(), *self._loss_problems(), *self._critic_problems()):
            raise ValueError(problem)
        return self

    def _kind_problems(self) -> Iterator[str]:
        size = self.num_generations_per_prompt
        if self.kind == "grpo" and size < 2:
            yield (
                f"algorithm.num_generations_per_prompt is {size}, but algorithm.kind 'grpo' compares the completions "
                f"of a prompt (algorithm.baseline '{self.baseline}'); use at least 2, or algorithm.kind 'ppo'"
            )
        foreign, used_by = (GRPO_ONLY, "grpo") if self.kind == "ppo" else (PPO_ONLY, "ppo")
        for key, value in self._changed(foreign):
            yield (
                f"algorithm.{key} is {value!r}, but only algorithm.kind '{used_by}' uses it and algorithm.kind is "
                f"'{self.kind}'; remove it or set algorithm.kind to '{used_by}'"
            )

    def _changed(self, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        """Keys (dotted inside a section) whose value is not the default."""
        for name in names:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if isinstance(value, CriticConfig):
                given = value.model_dump()
                yield from ((f"{name}.{key}", given[key]) for key, usual in default if given[key] != usual)
            elif value != default:
                yield name, value

    def _loss_problems(self) -> Iterator[str]:
        if self.normalization_length is not None and self.loss_normalization != "constant_length":
            yield (
                f"algorithm.normalization_length is {self.normalization_length}, but algorithm.loss_normalization "
                f"'{self.loss_normalization}' uses no length; remove it or use 'constant_length'"
            )
        if self.importance_correction == "sequence" and self.clip_reference == "generator":
            yield (
                "algorithm.importance_correction is 'sequence', but with algorithm.clip_reference 'generator' the "
                "clipped ratio of each token is the correction already; set algorithm.clip_reference to 'trainer'"
            )
        capped_ratio = self.importance_correction == "token" and self.clip_reference == "generator"
        if capped_ratio and self.importance_weight_cap < 1 + self.clip_high:
            yield (
                f"algorithm.importance_weight_cap {self.importance_weight_cap} is less than 1 + algorithm.clip_high "
                f"{self.clip_high}: the cap would act before the clipping; raise the cap"
            )

    def _critic_problems(self) -> Iterator[str]:
        if self.policy_training_start_step >= self.max_steps:
            yield (
                f"algorithm.policy_training_start_step is {self.policy_training_start_step}, but the run has "
                f"algorithm.max_steps {self.max_steps}: no step would train the policy; lower it or raise max_steps"
            )
        if self.mask_truncated and self.critic.bootstrap_truncated:
            yield (
                "algorithm.mask_truncated leaves truncated completions out, so that "
                "algorithm.critic.bootstrap_truncated has nothing to act on; set one of them to false"
            )
