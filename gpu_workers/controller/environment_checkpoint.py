"""Environments at a snapshot and at a restore: closed, exported, checked against the cut, opened again.

    snapshot   close dispatch, pause deadlines -> prepare all -> commit all -> (cut) -> resume all, open dispatch
    restore    restore all under the next attempt -> (links of the restore) -> open_restored | discard_restored

Giving up is always safe: an instance that hears nothing opens itself again when its lease ends.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from gpu_workers.controller.environment_snapshot import EnvironmentSnapshot, group_of
from gpu_workers.controller.parts import RolloutParts, RolloutRuntimeState
from gpu_workers.controller.ports import Trace
from gpu_workers.controller.recovery_ledger import RecoveryLedger
from gpu_workers.controller.rollout_deadlines import RolloutDeadlines
from gpu_workers.environments.ports import EnvironmentControl, EpisodeId
from storage.errors import (
    BrokenInvariant,
    EnvironmentUnreachable,
    InfrastructureFailure,
    MidflightError,
    RestoreRefused,
)
from storage.records import EpisodeRecord

_DRAIN_TURN_S = 0.005
_SLACK_S = 1.0

T = TypeVar("T")


class EnvironmentCheckpoint(Protocol):
    """The environments of a run for its controller."""

    def snapshot(self, checkpoint_id: str) -> AbstractAsyncContextManager[EnvironmentSnapshot | None]:
        """Within the block all instances are closed and exported; None when there is nothing to save.

        Raises InfrastructureFailure or a retryable refusal when an instance is not ready: everything is open again.
        """
        ...

    async def restore(self, episodes: Sequence[EpisodeRecord]) -> Mapping[str, EpisodeRecord]:
        """Give saved episodes to the instances, all of them or none, closed; by rollout what they are now: under the
        environment's next attempt. An earlier restore is discarded.
        """
        ...

    async def discard_restored(self) -> None:
        """Undo `restore`."""
        ...

    async def open_restored(self) -> None:
        """Let restored episodes go on."""
        ...

    def instance_of(self, group_id: str) -> str | None:
        """The instance that holds restored episodes of a group."""
        ...

    async def retire(self, episodes: Sequence[EpisodeId]) -> None:
        """These attempts, and all before them, may not go on anywhere."""
        ...

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """Nothing of these rollouts will be asked for again."""
        ...


class NoEnvironmentCheckpoint:
    """For runs whose environments have no state that can be saved."""

    @asynccontextmanager
    async def snapshot(self, _checkpoint_id: str) -> AsyncIterator[EnvironmentSnapshot | None]:
        """Nothing is closed."""
        yield None

    async def restore(self, episodes: Sequence[EpisodeRecord]) -> Mapping[str, EpisodeRecord]:
        """Raises RestoreRefused when there is state to restore."""
        if episodes:
            names = sorted({episode.environment for episode in episodes})
            raise RestoreRefused(
                f"the snapshot holds {len(episodes)} running episodes of {', '.join(names)}, but this run has no "
                "environment that can take them over: restore with the data.task and environment.servers that it was "
                "started with"
            )
        return {}

    async def discard_restored(self) -> None:
        """Nothing was restored."""

    async def open_restored(self) -> None:
        """Nothing was restored."""

    def instance_of(self, _group_id: str) -> str | None:
        """None."""
        return None

    async def retire(self, episodes: Sequence[EpisodeId]) -> None:
        """Nothing to refuse."""

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """Nothing to forget."""


class InstancesCheckpoint:
    """All instances of an environment, by their control planes."""

    def __init__(
        self,
        instances: Sequence[EnvironmentControl],
        *,
        ledger: RecoveryLedger,
        state: RolloutRuntimeState,
        deadlines: RolloutDeadlines,
        trace: Trace,
        incarnation: str,
        deadline_s: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`deadline_s`: of each phase; `incarnation` makes checkpoint ids this controller's own."""
        self._instances = {control.instance: control for control in instances}
        self._ledger = ledger
        self._state = state
        self._deadlines = deadlines
        self._trace = trace
        self._incarnation = incarnation
        self._deadline_s = deadline_s
        self._wall_clock = wall_clock
        self._pins: dict[str, str] = {}
        self._closings = 0
        self._restores = 0
        self._restored: dict[str, list[EpisodeRecord]] = {}

    @asynccontextmanager
    async def snapshot(self, checkpoint_id: str) -> AsyncIterator[EnvironmentSnapshot | None]:
        """Close, export, and open again, whatever happens."""
        if not any(group.level.keeps_turns for group in self._ledger.groups()):
            yield None
            return
        self._closings += 1  # an attempt that is tried again closes anew: instances take an id once
        checkpoint = f"{self._incarnation}-{checkpoint_id}-{self._closings}"
        began, committed = time.monotonic(), False
        self._state.environment_closed = True
        try:
            with self._deadlines.paused():
                exported = await self._export(checkpoint)
                committed = True
                yield exported
        finally:
            await self._open(checkpoint, committed=committed)
            self._state.environment_closed = False
            self._state.changed.notify()
            self._trace.record("environment_parked", seconds=time.monotonic() - began, committed=committed)

    async def _export(self, checkpoint: str) -> EnvironmentSnapshot:
        closed = await self._prepare(checkpoint)
        exported = await self._all(lambda control: control.commit(checkpoint, self._deadline()), closed)
        for export in exported:
            if self._instances.get(export.instance) is None or export.checkpoint_id != checkpoint:
                raise BrokenInvariant(
                    f"an environment answered as instance {export.instance} for checkpoint {export.checkpoint_id}, "
                    f"asked were {sorted(self._instances)} for {checkpoint}: its topology has changed, restart the run"
                )
        snapshot = EnvironmentSnapshot(tuple(exported))
        await self._drain(snapshot)
        return snapshot

    async def _prepare(self, checkpoint: str) -> list[str]:
        """The instances that are closed now. One whose process is gone holds nothing that could be saved: its siblings
        are run again from what the controller has of them, and no snapshot waits until it is back.
        """
        names = list(self._instances)
        asked = (self._instances[name].prepare(checkpoint, self._deadline()) for name in names)
        replies = await asyncio.gather(*(self._answer(call) for call in asked), return_exceptions=True)
        gone = {name for name, reply in zip(names, replies, strict=True) if isinstance(reply, EnvironmentUnreachable)}
        for name, reply in zip(names, replies, strict=True):
            if name in gone:
                self._trace.record("environment_unreachable", instance=name, reason=str(reply)[:500])
            elif isinstance(reply, BaseException):
                raise reply
        return [name for name in names if name not in gone]

    async def _drain(self, snapshot: EnvironmentSnapshot) -> None:
        """Turns that were finished before the environment closed may still be on their way here."""
        deadline = time.monotonic() + self._deadline_s
        while missing := snapshot.missing_calls(self._ledger):
            if time.monotonic() > deadline:
                raise InfrastructureFailure(
                    f"{len(missing)} calls of exported turns did not arrive within {self._deadline_s} s: {missing[:3]}"
                )
            await asyncio.sleep(_DRAIN_TURN_S)

    async def _open(self, checkpoint: str, *, committed: bool) -> None:
        """After a commit a failing resume is only worth a warning: the lease opens the instance."""
        replies = await asyncio.gather(
            *(self._answer(control.resume(checkpoint)) for control in self._instances.values()), return_exceptions=True
        )
        for control, reply in zip(self._instances.values(), replies, strict=True):
            if isinstance(reply, BaseException) and not isinstance(reply, EnvironmentUnreachable):
                facts = {"instance": control.instance, "reason": str(reply)[:500], "committed": committed}
                self._trace.record("environment_resume_failed", **facts)

    async def restore(self, episodes: Sequence[EpisodeRecord]) -> Mapping[str, EpisodeRecord]:
        """Each group goes to one instance: its own if that is there, else one by its place in the list."""
        await self.discard_restored()
        left = await self._clear_left_over({episode.rollout_id for episode in episodes})
        if not episodes:
            return {}
        self._restores += 1
        raised = [replace(e, attempt=max(e.attempt + self._restores - 1, left.get(e.rollout_id, 0))) for e in episodes]
        placed = self._place(raised)
        checkpoint = f"{self._incarnation}-restore-{self._restores}"
        self._restored = {instance: placed[instance] for instance in placed}
        try:
            await self._all(
                lambda control: control.restore(checkpoint, self._deadline(), placed[control.instance]), placed
            )
        except BaseException:
            await self.discard_restored()
            raise
        self._pins = {group_of(e.rollout_id): name for name, taken in placed.items() for e in taken}
        return {episode.rollout_id: replace(episode, attempt=episode.attempt + 1) for episode in raised}

    async def _clear_left_over(self, restored: set[str]) -> dict[str, int]:
        """Stop what an earlier controller left in instances that outlived it; the newest attempt of each rollout."""
        newest: dict[str, int] = {}
        statuses = await self._all(lambda control: control.status())
        for name in [status.instance for status in statuses if status.episodes]:
            self._closings += 1
            checkpoint, control = f"{self._incarnation}-clear-{self._closings}", self._instances[name]
            try:
                await self._answer(control.prepare(checkpoint, self._deadline()))
                exported = await self._answer(control.commit(checkpoint, self._deadline()))
                found = [*(EpisodeId(e.rollout_id, e.attempt) for e in exported.episodes), *exported.restarts]
                await self._answer(control.retire(found))
            finally:
                await self._answer(control.resume(checkpoint))
            for episode in found:
                newest[episode.rollout_id] = max(episode.attempt, newest.get(episode.rollout_id, 0))
            await self._answer(control.forget([e.rollout_id for e in found if e.rollout_id not in restored]))
        return newest

    def _place(self, episodes: Iterable[EpisodeRecord]) -> dict[str, list[EpisodeRecord]]:
        names, placed = sorted(self._instances), dict[str, list[EpisodeRecord]]()
        chosen: dict[str, str] = {}
        for episode in episodes:
            group = group_of(episode.rollout_id)
            if group not in chosen:
                own = episode.instance in self._instances
                chosen[group] = episode.instance if own else names[len(chosen) % len(names)]
            placed.setdefault(chosen[group], []).append(episode)
        return placed

    async def discard_restored(self) -> None:
        """Everywhere, also where the restore failed: the next attempt is retired there."""
        restored, self._restored, self._pins = self._restored, {}, {}
        if not restored:
            return
        checkpoint = f"{self._incarnation}-restore-{self._restores}"
        for name in restored:
            with suppress(MidflightError):  # a dead instance holds nothing any more
                await self._answer(self._instances[name].discard_restored(checkpoint))

    async def open_restored(self) -> None:
        """From now on they are live, and are not undone any more."""
        restored, self._restored = self._restored, {}
        checkpoint = f"{self._incarnation}-restore-{self._restores}"
        if restored:
            await self._all(lambda control: control.resume(checkpoint), restored)

    def instance_of(self, group_id: str) -> str | None:
        """Where its episodes were restored."""
        return self._pins.get(group_id)

    async def retire(self, episodes: Sequence[EpisodeId]) -> None:
        """Everywhere: nobody knows where a rollout ran that did not answer. One that is down starts empty."""
        for control in self._instances.values():
            with suppress(MidflightError):
                await self._answer(control.retire(episodes))

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """Marks that stay because an instance did not answer cost nothing but their memory."""
        for control in self._instances.values():
            with suppress(MidflightError):
                await self._answer(control.forget(rollout_ids))

    def _deadline(self) -> float:
        return self._wall_clock() + self._deadline_s

    async def _all(self, ask: Callable[[EnvironmentControl], Any], names: Iterable[str] | None = None) -> list[Any]:
        """One question to all (or some) instances together; the first failure is raised once all have answered."""
        asked = [self._instances[name] for name in (self._instances if names is None else names)]
        replies = await asyncio.gather(*(self._answer(ask(control)) for control in asked), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return list(replies)

    async def _answer(self, call: Awaitable[T]) -> T:
        """InfrastructureFailure when an instance says nothing, a little after the deadline that it was told."""
        try:
            return await asyncio.wait_for(call, self._deadline_s + _SLACK_S)
        except TimeoutError as error:
            raise InfrastructureFailure(
                f"an environment did not answer within environment.deadline_s {self._deadline_s} s; try again"
            ) from error


def build_environment_checkpoint(
    parts: RolloutParts, instances: Sequence[EnvironmentControl], deadlines: RolloutDeadlines, *, incarnation: str
) -> EnvironmentCheckpoint:
    """That of the instances that can save episodes; without any (single-turn tasks, `restart_only` servers) the one
    that has no state.
    """
    if not instances:
        return NoEnvironmentCheckpoint()
    return InstancesCheckpoint(
        instances,
        ledger=parts.ledger,
        state=parts.state,
        deadlines=deadlines,
        trace=parts.trace,
        incarnation=incarnation,
        deadline_s=parts.config.environment.deadline_s,
    )
