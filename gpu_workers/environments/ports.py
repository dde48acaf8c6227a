"""Between a rollout and its environment, and between the controller and an environment: the Protocols of both.

A rollout opens an episode and steps it; a controller closes the environment for a checkpoint, takes its episodes and
opens it again. One instance serves both and keeps one table of episodes.

    idle --prepare--> preparing --all at a turn boundary--> prepared --commit--> committed --resume--> idle
    idle --restore--> restored --resume--> idle;  any --resume or the end of the lease--> idle
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from storage.records import EpisodeRecord, episode_key


@dataclass(frozen=True, slots=True)
class EpisodeId:
    """`attempt` is the environment's: it is raised by a re-run and by a restore."""

    rollout_id: str
    attempt: int

    def __str__(self) -> str:
        return episode_key(self.rollout_id, self.attempt)


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """What an episode is opened with. `task_json` is a JSON object; `seed` is that of the prompt.

    `saved`: an earlier attempt at a turn boundary, from which the episode goes on where nobody has it.
    """

    environment: str
    task_json: str
    seed: int
    generation_index: int
    deadline_s: float
    saved: EpisodeRecord | None = None


@dataclass(frozen=True, slots=True)
class Boundary:
    """An episode between two turns: what the policy has to read, and the record of all that went before.

    `observation` continues the tokens so far; `done` means that there is no next turn.
    """

    turn: int
    observation: str
    done: bool
    record: EpisodeRecord


@dataclass(frozen=True, slots=True)
class CallRef:
    """The staged model call whose completion is the action: its key and the newest weight version in it."""

    key: str
    weight_version: int


class Episodes(Protocol):
    """The rollout's side. All refusals are `EnvironmentRefusal`; what the environment's own code raises is a
    `DataFailure`.
    """

    async def open(self, episode: EpisodeId, task: EpisodeTask) -> Boundary:
        """Start an episode, or continue one that was restored under this id, or is saved in `task`.

        Refused: `environment_closed`, `stale_attempt` (at or below a retired one), `unknown_environment`.
        """
        ...

    async def step(self, episode: EpisodeId, turn: int, action: str, call: CallRef) -> Boundary:
        """Take turn `turn` (the number of finished ones). While the environment is closed the call waits, and so does
        the episode's deadline. The last turn taken again with the same action and call is not applied again.

        Refused: `unknown_episode`, `stale_attempt`, `turn_conflict` (another turn, or another action for a taken one).
        """
        ...

    async def close(self, episode: EpisodeId) -> None:
        """Forget an episode; unknown ones are ignored."""
        ...


class PlayedEpisodes(Episodes, Protocol):
    """Episodes whose model calls are bounded too."""

    def deadline(self, episode: EpisodeId) -> AbstractAsyncContextManager[None]:
        """Ends its body with TimeoutError once the episode's time is used up."""
        ...


class Phase(StrEnum):
    """Of a checkpoint in one instance."""

    IDLE = "idle"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTED = "committed"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """What an instance says of itself; `lease_left_s` is 0 while idle."""

    instance: str
    phase: Phase
    checkpoint_id: str | None
    episodes: int
    parked: int
    lease_left_s: float


@dataclass(frozen=True, slots=True)
class Exported:
    """What `commit` returns: every live episode that can come back, and the ids of those that can't."""

    instance: str
    checkpoint_id: str
    episodes: tuple[EpisodeRecord, ...]
    restarts: tuple[EpisodeId, ...]


class EnvironmentControl(Protocol):
    """The controller's side of one instance. `deadline_ts` is in Unix seconds. `prepare`, `commit` and `restore` are
    replayed for the id they were done for. Refusals are `EnvironmentRefusal` with the code in brackets.
    """

    @property
    def instance(self) -> str:
        """The instance's name: stable over its restarts."""
        ...

    async def status(self) -> InstanceStatus: ...

    async def prepare(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """Close: no episode is opened, none takes another turn; returns when all are at a turn boundary.

        [checkpoint_conflict] another checkpoint is under way; [stale_checkpoint] this one was given up;
        [deadline_exceeded] an episode did not reach a boundary: the instance is open again.
        """
        ...

    async def renew(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """Lengthen the lease, which is never shortened."""
        ...

    async def commit(self, checkpoint_id: str, deadline_ts: float) -> Exported:
        """The episodes at their boundaries. [invalid_phase] not prepared."""
        ...

    async def restore(
        self, checkpoint_id: str, deadline_ts: float, episodes: Sequence[EpisodeRecord]
    ) -> InstanceStatus:
        """Take over saved episodes, each under the next attempt: all of them or none; closed until `resume`.

        [invalid_phase] episodes are live; [invalid_checkpoint_state] an environment, its version, a state or its
        digest is not what it should be; [stale_attempt] an attempt is at or below a retired one.
        """
        ...

    async def discard_restored(self, checkpoint_id: str) -> InstanceStatus:
        """Undo a restore: its episodes are gone, the next attempt of each is retired, the instance is idle."""
        ...

    async def resume(self, checkpoint_id: str) -> InstanceStatus:
        """Open again; nothing happens when it is open."""
        ...

    async def retire(self, episodes: Sequence[EpisodeId]) -> None:
        """Refuse these attempts and all before them from now on, then stop them."""
        ...

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """The rollouts are sealed or given up: forget their retired attempts and whatever is left of them."""
        ...
