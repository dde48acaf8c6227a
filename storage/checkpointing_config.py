"""The configuration section `checkpointing`."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from storage.config_section import NonNegativeInt, PositiveInt, Section

_DURATION = re.compile(r"(?:(?:(?P<days>\d+):)?(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


class CheckpointingConfig(Section):
    """Trainer checkpoints and what a resumed run starts from."""

    save_period: PositiveInt = Field(1, description="Train steps between trainer checkpoints.")
    checkpoint_must_save_by: str | None = Field(
        None,
        description="Time since the start of the process, as days:hours:minutes:seconds ('0:03:40:00'). A checkpoint "
        "is saved, once, at the step boundary after which the next one might come too late.",
    )
    async_save: bool = Field(
        False, description="Write periodic trainer checkpoints in the background, beside the next steps."
    )
    defer_async_checkpoint_finalize: bool = Field(
        False,
        description="async_save: publish at a step boundary or with the next snapshot, not as soon as all is written.",
    )
    keep: PositiveInt = Field(3, description="Newest trainer checkpoints that retention keeps.")
    keep_best: NonNegativeInt = Field(0, description="Trainer checkpoints kept beside them for the best metric_name.")
    metric_name: str | None = Field(
        None, description="keep_best: 'rewards_mean', or one of the metrics that train steps report."
    )
    higher_is_better: bool = Field(True, description="keep_best: whether the highest value is the best.")
    save_data_plane: bool = Field(True, description="Trainer checkpoints hold the replay buffer's rows too.")
    restore_mode: Literal["latest", "trainer_checkpoint"] = Field(
        "latest", description="'trainer_checkpoint' ignores rollout snapshots."
    )
    allow_older: bool = Field(True, description="Pass over an invalid bundle and restore an older one (reported).")
    load_replay_buffer: bool = Field(
        True, description="False: saved groups are checked, then their prompts are generated again."
    )

    @property
    def must_save_by_s(self) -> float | None:
        """`checkpoint_must_save_by` in seconds."""
        found = _DURATION.fullmatch(self.checkpoint_must_save_by or "")
        if found is None:
            return None
        return float(sum(int(found[unit] or 0) * seconds for unit, seconds in _SECONDS.items()))

    @field_validator("checkpoint_must_save_by", mode="before")
    @classmethod
    def _is_a_duration(cls, value: Any) -> Any:
        """YAML reads 3:40:00 without quotes as one number, and 1:00:00:00 as a wrong one."""
        if value is None or (isinstance(value, str) and _DURATION.fullmatch(value)):
            return value
        raise ValueError(f"{value!r} is no duration; give days:hours:minutes:seconds in quotes, such as '0:03:40:00'")

    @model_validator(mode="after")
    def _refuse_what_does_nothing(self) -> Self:
        if self.defer_async_checkpoint_finalize and not self.async_save:
            raise ValueError(
                "defer_async_checkpoint_finalize is true, but async_save is false: nothing is published later; "
                "set async_save to true as well"
            )
        if self.keep_best and self.metric_name is None:
            raise ValueError(
                f"keep_best is {self.keep_best}, but metric_name names no metric to choose by; set it, for example to "
                "'rewards_mean'"
            )
        if self.metric_name is not None and not self.keep_best:
            raise ValueError(
                f"metric_name is '{self.metric_name}', but keep_best is 0; raise it or leave metric_name out"
            )
        return self
