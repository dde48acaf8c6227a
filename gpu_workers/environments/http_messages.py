"""Bodies of an environment's HTTP form; both sides check with them, and unknown fields are refused."""

from pydantic import BaseModel, ConfigDict

from gpu_workers.environments.ports import Boundary, CallRef, EpisodeId, EpisodeTask, Exported, InstanceStatus
from storage.records import EpisodeRecord

CONTROL = "/ng-control/v1/checkpoint"
EPISODES = "/v1/episodes"
TOKEN_VARIABLE = "MIDFLIGHT_ENVIRONMENT_TOKEN"
DATA_FAILURE = "data_failure"
INFRASTRUCTURE_FAILURE = "infrastructure_failure"
INVALID_REQUEST = "invalid_request"


class Message(BaseModel):
    """Base of all; the records inside are refused for unknown fields too."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CheckpointBody(Message):
    """Of `resume` and `discard_restored`."""

    checkpoint_id: str


class TimedBody(CheckpointBody):
    """Of `prepare`, `renew` and `commit`."""

    deadline_ts: float


class RestoreBody(TimedBody):
    """Of `restore`."""

    episodes: tuple[EpisodeRecord, ...]


class RetireBody(Message):
    """Of `retire`."""

    episodes: tuple[EpisodeId, ...]


class ForgetBody(Message):
    """Of `forget`."""

    rollout_ids: tuple[str, ...]


class CloseBody(Message):
    """Of an episode's `close`."""

    episode: EpisodeId


class OpenBody(CloseBody):
    """Of an episode's `open`."""

    task: EpisodeTask


class StepBody(CloseBody):
    """Of an episode's `step`."""

    turn: int
    action: str
    call: CallRef


class Done(Message):
    """The reply that says nothing more."""


class StatusReply(Message):
    """Of most control calls."""

    status: InstanceStatus


class ExportReply(Message):
    """Of `commit`."""

    exported: Exported


class BoundaryReply(Message):
    """Of `open` and `step`."""

    boundary: Boundary


class ErrorBody(Message):
    """`code` is one of `EnvironmentRefusal.CODES`, or one of the three above."""

    code: str
    message: str


class ErrorReply(Message):
    """Of everything that is not 200."""

    error: ErrorBody
