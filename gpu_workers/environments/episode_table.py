"""The episodes of one instance: runs turns, makes a boundary after each, and holds them while it is closed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from gpu_workers.controller.signal import Signal
from gpu_workers.environments.episode_records import (
    boundary_of,
    check_restorable,
    first_record,
    generation_index_of,
    invalid,
    last_action,
    next_record,
    task_of,
)
from gpu_workers.environments.interface import Environment, Json, Mode, Step, reset_rng, turn_rng
from gpu_workers.environments.ports import Boundary, CallRef, EpisodeId, EpisodeTask
from storage.errors import ConfigurationError, DataFailure, EnvironmentRefusal, InfrastructureFailure, MidflightError
from storage.records import EpisodeRecord


@dataclass(slots=True)
class _Episode:
    """`deadline_at` and `parked_before_s` are on the clocks of the table; `ended` refuses whoever still waits."""

    id: EpisodeId
    environment: Environment
    generation_index: int
    record: EpisodeRecord
    state: Json
    deadline_at: float
    parked_before_s: float
    running: tuple[int, str, CallRef, asyncio.Task[Boundary]] | None = None
    ended: EnvironmentRefusal | None = None


class EpisodeTable:
    """Implements `Episodes`; one event loop only. `find` makes an environment of a name, once for each name.

    While the table is closed nothing is opened or stepped and no deadline runs. A turn that has begun is finished.
    """

    def __init__(
        self, instance: str, find: Callable[[str], Environment], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.instance = instance
        self._find = find
        self._clock = clock
        self._environments: dict[str, Environment] = {}
        self._episodes: dict[EpisodeId, _Episode] = {}
        self._opening: dict[EpisodeId, asyncio.Task[Step]] = {}
        self._entering = 0
        self._retired: dict[str, int] = {}
        self._closed_at: float | None = None
        self._parked_s = 0.0
        self._timeouts: list[tuple[_Episode, asyncio.Timeout]] = []
        self._changed = Signal()

    def __len__(self) -> int:
        """Episodes that are live, or are being opened."""
        return len(self._episodes) + self._entering

    async def open(self, episode: EpisodeId, task: EpisodeTask) -> Boundary:
        """See `Episodes.open`. An episode that is open already is continued."""
        self._admit(episode)
        if self.is_closed:
            raise EnvironmentRefusal(
                "environment_closed", f"'{self.instance}' is closed for a checkpoint; open {episode} once it is open"
            )
        known = self._episodes.get(episode)
        if known is None and task.saved is not None:
            known = self._reopened(episode, task, task.saved)
        if known is not None:
            boundary = self._continued(known, task)
            self._episodes[episode] = known
            return boundary
        if generation_index_of(episode.rollout_id) != task.generation_index:
            raise EnvironmentRefusal(
                "rollout_id_required", f"episode {episode} was given the generation index {task.generation_index}"
            )
        started = self._open_clock()
        parked_before_s = self._parked_total_s()
        environment = self._environment(task.environment)
        self._entering += 1
        try:
            step = await self._reset(episode, task, environment)
            self._admit(episode)  # it may have been retired meanwhile
            if episode not in self._episodes:
                record = first_record(self.instance, episode, task, environment, step)
                self._episodes[episode] = _Episode(
                    id=episode,
                    environment=environment,
                    generation_index=task.generation_index,
                    record=record,
                    state=step.state,
                    deadline_at=started + task.deadline_s,
                    parked_before_s=parked_before_s,
                )
        finally:
            self._entering -= 1
            self._changed.notify()
        return self._boundary(self._episodes[episode])

    async def step(self, episode: EpisodeId, turn: int, action: str, call: CallRef) -> Boundary:
        """See `Episodes.step`; InfrastructureFailure once the episode's deadline has passed."""
        entry = self._live(episode)
        if self._taken(entry, turn, action, call):
            return self._boundary(entry)
        await self._changed.wait_for(lambda: not self.is_closed or entry.ended is not None)
        if entry.ended is not None:
            raise entry.ended
        if self._taken(entry, turn, action, call):  # a retry of the same call was let in first
            return self._boundary(entry)
        if entry.running is None:
            self._check_deadline(entry)
            self._check_turn(entry, turn)
            if not entry.environment.blocking:
                return self._finish(entry, action, call, self._apply(entry, action))
            task = asyncio.create_task(self._blocking_turn(entry, action, call))
            entry.running = (turn, action, call, task)
            task.add_done_callback(lambda _: self._changed.notify())
        elif entry.running[:3] != (turn, action, call):
            raise self._conflict(entry, turn, "while another call is being applied")
        return await self._joined(entry, entry.running[3])

    async def close(self, episode: EpisodeId) -> None:
        """Forget an episode; unknown ones are ignored."""
        if episode in self._episodes:
            self._end(episode, EnvironmentRefusal("unknown_episode", f"episode {episode} was closed meanwhile"))

    def deadline_left_s(self, episode: EpisodeId) -> float:
        """Seconds left while open; negative once the deadline has passed. Refused: `unknown_episode`."""
        return self._live(episode).deadline_at - self._open_clock()

    @asynccontextmanager
    async def deadline(self, episode: EpisodeId) -> AsyncIterator[None]:
        """Ends its body with TimeoutError once the episode's time is used up; it stands still while closed."""
        entry = self._live(episode)
        async with asyncio.timeout(None) as timeout:
            watched = (entry, timeout)
            self._timeouts.append(watched)
            self._schedule(*watched)
            try:
                yield
            finally:
                self._timeouts.remove(watched)

    # What the control plane does with the table.

    @property
    def is_closed(self) -> bool:
        """Whether calls are held."""
        return self._closed_at is not None

    @property
    def parked(self) -> int:
        """Episodes at a turn boundary of a closed table."""
        return sum(entry.running is None for entry in self._episodes.values()) if self.is_closed else 0

    @property
    def is_parked(self) -> bool:
        """Closed, and every episode is at a turn boundary."""
        return self.is_closed and not self._entering and self.parked == len(self._episodes)

    async def wait_until_parked(self) -> None:
        """Until every turn that had begun is finished, or the table was opened again."""
        await self._changed.wait_for(lambda: self.is_parked or not self.is_closed)

    def hold(self) -> None:
        """Close."""
        if self._closed_at is None:
            self._closed_at = self._clock()
            self._reschedule()

    def release(self) -> None:
        """Open again; held calls go on."""
        if self._closed_at is not None:
            self._parked_s += self._clock() - self._closed_at
            self._closed_at = None
            self._reschedule()
            self._changed.notify()

    def export(self) -> tuple[tuple[EpisodeRecord, ...], tuple[EpisodeId, ...]]:
        """The records of all episodes that can come back, and the ids of the others."""
        entries = self._episodes.values()
        returning = tuple(self._current(e) for e in entries if e.environment.mode is not Mode.RESTART_ONLY)
        return returning, tuple(e.id for e in entries if e.environment.mode is Mode.RESTART_ONLY)

    def adopt(self, records: Sequence[EpisodeRecord]) -> tuple[EpisodeId, ...]:
        """Take over all records, each as its next attempt, or none of them. Refusals: see `EnvironmentControl`."""
        adopted: dict[EpisodeId, _Episode] = {}
        for record in records:
            entry = self._restored(record)
            if entry.id in adopted:
                raise invalid(record, "is given twice")
            adopted[entry.id] = entry
        self._episodes.update(adopted)
        return tuple(adopted)

    def retire(self, episodes: Iterable[EpisodeId]) -> None:
        """Refuse these attempts and those before them, then stop them."""
        for episode in episodes:
            newest = max(episode.attempt, self._retired.get(episode.rollout_id, episode.attempt))
            self._retired[episode.rollout_id] = newest
        for episode in [e for e in self._episodes if self._is_retired(e)]:
            self._end(episode, self._stale(episode))

    def forget(self, rollout_ids: Iterable[str]) -> None:
        """Lift the marks of these rollouts, and drop what is left of them."""
        forgotten = set(rollout_ids)
        for rollout in forgotten:
            self._retired.pop(rollout, None)
        for episode in [e for e in self._episodes if e.rollout_id in forgotten]:
            self._end(episode, EnvironmentRefusal("unknown_episode", f"episode {episode} was forgotten"))

    # Turns.

    async def _reset(self, episode: EpisodeId, task: EpisodeTask, environment: Environment) -> Step:
        opened = task_of(task.task_json, episode)
        where = f"environment '{environment.name}', episode {episode}, reset"
        if not environment.blocking:
            return _guarded(where, lambda: environment.reset(opened, reset_rng(task.seed)))
        if episode not in self._opening:
            work = asyncio.to_thread(_guarded, where, lambda: environment.reset(opened, reset_rng(task.seed)))
            self._opening[episode] = asyncio.create_task(work)
            self._opening[episode].add_done_callback(lambda _: self._opening.pop(episode))
        return await asyncio.shield(self._opening[episode])

    def _apply(self, entry: _Episode, action: str) -> Step:
        record, environment = entry.record, entry.environment
        where = f"environment '{environment.name}', episode {entry.id}, turn {record.turn}"
        # Each turn starts from the saved text, as it would after a restore.
        state = entry.state if environment.mode is Mode.RESTART_ONLY else json.loads(record.state_json)
        rng = turn_rng(record.seed, generation_index=entry.generation_index, turn=record.turn)
        return _guarded(where, lambda: environment.step(state, action, rng))

    async def _blocking_turn(self, entry: _Episode, action: str, call: CallRef) -> Boundary:
        try:
            step = await asyncio.to_thread(self._apply, entry, action)
            if entry.ended is not None:
                raise entry.ended
            return self._finish(entry, action, call, step)
        finally:
            entry.running = None

    def _finish(self, entry: _Episode, action: str, call: CallRef, step: Step) -> Boundary:
        entry.record = next_record(entry.record, entry.environment, action=action, call=call, step=step)
        entry.state = step.state
        return self._boundary(entry)

    async def _joined(self, entry: _Episode, task: asyncio.Task[Boundary]) -> Boundary:
        """The turn's own task goes on when a caller is cancelled, so that a retry finds it applied once."""
        try:
            async with self.deadline(entry.id):
                await self._changed.wait_for(lambda: task.done() or entry.ended is not None)
        except TimeoutError as error:
            raise self._too_late(entry) from error
        if entry.ended is not None:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else asks for it
            raise entry.ended
        return await task

    def _taken(self, entry: _Episode, turn: int, action: str, call: CallRef) -> bool:
        """Whether this is the newest turn once more."""
        record = entry.record
        if turn != record.turn - 1:
            return False
        if (action, call) != (last_action(record), CallRef(record.calls[-1], record.weight_versions[-1])):
            raise self._conflict(entry, turn, f"which was taken by call {record.calls[-1]!r}")
        return True

    def _check_turn(self, entry: _Episode, turn: int) -> None:
        if turn != entry.record.turn:
            raise self._conflict(entry, turn, f"but {entry.record.turn} turns are finished")
        if boundary_of(entry.record).done:
            raise self._conflict(entry, turn, "but the episode is done")

    def _conflict(self, entry: _Episode, turn: int, why: str) -> EnvironmentRefusal:
        return EnvironmentRefusal("turn_conflict", f"episode {entry.id} was given turn {turn}, {why}; open it again")

    def _continued(self, entry: _Episode, task: EpisodeTask) -> Boundary:
        self._check_deadline(entry)
        record = entry.record
        saved = (record.environment, record.task_json, record.seed, entry.generation_index)
        if saved != (task.environment, task.task_json, task.seed, task.generation_index):
            raise invalid(record, "was opened with another task, seed or environment")
        return self._boundary(entry)

    # Episodes.

    def _restored(self, record: EpisodeRecord) -> _Episode:
        episode = EpisodeId(record.rollout_id, record.attempt + 1)
        self._admit(episode)
        try:
            environment = self._environment(record.environment)
        except EnvironmentRefusal as error:
            raise invalid(record, f"can't go on here ({error.message})") from error
        check_restorable(record, environment)
        return _Episode(
            id=episode,
            environment=environment,
            generation_index=generation_index_of(record.rollout_id),
            record=replace(record, attempt=episode.attempt, instance=self.instance),
            state=json.loads(record.state_json),
            deadline_at=self._open_clock() + record.deadline_left_s,
            parked_before_s=self._parked_total_s() - record.parked_s,
        )

    def _reopened(self, episode: EpisodeId, task: EpisodeTask, saved: EpisodeRecord) -> _Episode:
        """One whose earlier attempt was lost with whoever had it; it gets its whole time again."""
        if saved.rollout_id != episode.rollout_id:
            raise invalid(saved, f"was given to open episode {episode}")
        before = replace(saved, attempt=episode.attempt - 1, deadline_left_s=task.deadline_s, parked_s=0.0)
        return self._restored(before)

    def _environment(self, name: str) -> Environment:
        if name not in self._environments:
            try:
                self._environments[name] = self._find(name)
            except (ConfigurationError, KeyError) as error:
                raise EnvironmentRefusal(
                    "unknown_environment", f"'{self.instance}' has no {name!r}: {error}"
                ) from error
        return self._environments[name]

    def _live(self, episode: EpisodeId) -> _Episode:
        self._admit(episode)
        if episode not in self._episodes:
            raise EnvironmentRefusal("unknown_episode", f"'{self.instance}' has no episode {episode}; open it first")
        return self._episodes[episode]

    def _admit(self, episode: EpisodeId) -> None:
        if self._is_retired(episode):
            raise self._stale(episode)

    def _is_retired(self, episode: EpisodeId) -> bool:
        return episode.attempt <= self._retired.get(episode.rollout_id, -1)

    def _stale(self, episode: EpisodeId) -> EnvironmentRefusal:
        newest = self._retired[episode.rollout_id]
        return EnvironmentRefusal("stale_attempt", f"episode {episode}: attempts up to {newest} were retired")

    def _end(self, episode: EpisodeId, why: EnvironmentRefusal) -> None:
        self._episodes.pop(episode).ended = why
        self._changed.notify()

    # Time: one clock stands still while closed, the other counts only then.

    def _parked_total_s(self) -> float:
        return self._parked_s + (0.0 if self._closed_at is None else self._clock() - self._closed_at)

    def _open_clock(self) -> float:
        return self._clock() - self._parked_total_s()

    def _current(self, entry: _Episode) -> EpisodeRecord:
        left, parked = entry.deadline_at - self._open_clock(), self._parked_total_s() - entry.parked_before_s
        return replace(entry.record, deadline_left_s=left, parked_s=parked)

    def _boundary(self, entry: _Episode) -> Boundary:
        return boundary_of(self._current(entry))

    def _check_deadline(self, entry: _Episode) -> None:
        if entry.deadline_at <= self._open_clock():
            raise self._too_late(entry)

    def _too_late(self, entry: _Episode) -> MidflightError:
        over = self._open_clock() - entry.deadline_at
        return InfrastructureFailure(f"episode {entry.id} is {over:.3f} s past its deadline; raise it or run it again")

    def _schedule(self, entry: _Episode, timeout: asyncio.Timeout) -> None:
        if not timeout.expired():
            left = entry.deadline_at - self._open_clock()
            timeout.reschedule(None if self.is_closed else asyncio.get_running_loop().time() + left)

    def _reschedule(self) -> None:
        for entry, timeout in self._timeouts:
            self._schedule(entry, timeout)


def _guarded(where: str, call: Callable[[], Step]) -> Step:
    """What an environment's own code raises is the prompt's failure."""
    try:
        return call()
    except Exception as error:
        raise DataFailure(f"{where} failed with {type(error).__name__}: {error}; mend it or drop the prompt") from error
