"""The section `async_rl`: samplers and staleness, failures of rollouts."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from storage.config_section import NonNegativeInt, PositiveFloat, PositiveInt, Section

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_USED_BY = {
    "max_lookahead_versions": ("in_order",),
    "warmup_lookahead_versions": ("in_order",),
    "max_staleness_versions": ("weight_fifo", "ready_first", "windowed"),
    "freshest_first": ("windowed",),
}
_MEANT = {
    "max_lookahead_versions": " and set async_rl.max_staleness_versions instead",
    "max_staleness_versions": " and set async_rl.max_lookahead_versions instead",
}


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
    warmup_lookahead_versions: NonNegativeInt | None = Field(
        None,
        description="max_lookahead_versions while the critic warms up (algorithm.policy_training_start_step): "
        "weights do not change then, so that running further ahead costs no staleness. null: no difference.",
    )
    buffer_capacity: PositiveInt | None = Field(
        None,
        description="Most groups in buffer and flight. By default what the sampler needs: num_prompts_per_step x "
        "(lookahead or staleness + 1), and no bound for windowed.",
    )
    min_groups_for_streaming_train: PositiveInt | None = Field(
        None,
        description="A train step starts with this many finished groups and takes up what finishes meanwhile, in "
        "chunks of at least as many (the last one may be smaller). null: it waits for its whole batch.",
    )
    finalizer_workers: PositiveInt = Field(
        2, description="Finished groups whose calls are made into training rows at once; others queue."
    )
    max_infrastructure_failures: NonNegativeInt = Field(5, description="Infrastructure failures a sibling survives.")
    max_data_failures: NonNegativeInt = Field(1, description="Data failures a sibling survives.")
    max_interrupted_attempts: PositiveInt = Field(
        20,
        description="Restarts of the run that a sibling survives while it is running. On its last chance a group takes "
        "turns with others like it, so that only a prompt that crashes the run is given up.",
    )
    retry_backoff_s: PositiveFloat = Field(0.5, description="First pause after an infrastructure failure; it doubles.")
    retry_backoff_max_s: PositiveFloat = Field(30.0, description="Longest pause between infrastructure retries.")
    rollout_timeout_s: PositiveFloat = Field(600.0, description="Deadline of one attempt.")
    on_dropped_prompt: Literal["shrink", "replace"] = Field(
        "replace", description="A group that is given up is replaced by a spare prompt, or its step shrinks."
    )
    max_skipped_prompts: NonNegativeInt = Field(16, description="Prompts a run may give up before it fails.")
    max_consecutive_dropped_prompts: NonNegativeInt = Field(
        8,
        description="Prompts in a row, in the order of the data, that a run may give up before it fails: a broken "
        "scorer or service is noticed long before max_skipped_prompts.",
    )
    spare_prompts: NonNegativeInt = Field(4, description="Prompts kept in hand to replace groups that are given up.")
    min_step_batch_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="Smallest share of num_prompts_per_step that a step may shrink to."
    )
    stall_timeout_s: PositiveFloat | None = Field(
        3600.0,
        description="Seconds without any progress (a completion, a finished group, a step, new weights) after which "
        "the run counts as stalled; more than rollout_timeout_s and than the longest train step. null: never.",
    )
    on_stall: Literal["report", "end"] = Field(
        "report", description="A stalled run is reported in trace, log and metrics, or also ended with an error."
    )

    @property
    def batches_ahead(self) -> int | None:
        """Most batches dispatched beyond the step being trained; None where no built-in gate says so."""
        match self.sampler:
            case "in_order":
                return max(self.max_lookahead_versions, self.warmup_lookahead_versions or 0)
            case "weight_fifo" | "ready_first":
                return self.max_staleness_versions
            case "windowed" | "custom":
                return None

    @model_validator(mode="after")
    def _refuse_half_a_custom_sampler(self) -> Self:
        path = self.custom_sampler
        if (self.sampler == "custom") != (path is not None):
            raise ValueError(
                f"async_rl.sampler is {self.sampler} and async_rl.custom_sampler is {path!r}; a sampler of your own "
                "needs both, 'custom' and 'package.module:Class'"
            )
        if path is not None and not _IMPORT_PATH.fullmatch(path):
            raise ValueError(f"async_rl.custom_sampler is {path!r}; expected package.module:Class")
        return self

    @model_validator(mode="after")
    def _refuse_a_hasty_watchdog(self) -> Self:
        if self.stall_timeout_s is not None and self.stall_timeout_s <= self.rollout_timeout_s:
            raise ValueError(
                f"async_rl.stall_timeout_s is {self.stall_timeout_s}, not more than async_rl.rollout_timeout_s "
                f"{self.rollout_timeout_s}: one long rollout would count as a stall; raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _refuse_options_of_other_samplers(self) -> Self:
        """An option that would do nothing was meant for another sampler, or for another option."""
        for option, users in _USED_BY.items():
            value, unset = getattr(self, option), type(self).model_fields[option].default
            if value != unset and self.sampler not in (*users, "custom"):
                raise ValueError(
                    f"async_rl.{option} is {value}, but sampler {self.sampler} does not use it ({', '.join(users)} "
                    f"would); leave it out{_MEANT.get(option, '')}"
                )
        return self

    @model_validator(mode="after")
    def _refuse_streaming_where_a_step_is_chosen_as_a_whole(self) -> Self:
        if self.min_groups_for_streaming_train is not None and self.freshest_first:
            raise ValueError(
                f"async_rl.min_groups_for_streaming_train is {self.min_groups_for_streaming_train}, but "
                "async_rl.freshest_first chooses the newest among all that is finished when a step is filled: its "
                "first chunk would take older groups than those that finish during the step; leave one of them out"
            )
        return self
