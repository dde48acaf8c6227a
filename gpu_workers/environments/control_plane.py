"""Checkpoints of one instance: their phases, ids and lease, over its episode table."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.ports import EpisodeId, Exported, InstanceStatus, Phase
from storage.errors import EnvironmentRefusal
from storage.records import EpisodeRecord

_REMEMBERED_IDS = 1024


class ControlPlane:
    """Implements `EnvironmentControl`. One checkpoint at a time; an id that was given up or resumed is never taken
    again, so each checkpoint and each restore needs a new one.

    Every call lengthens the lease to `grace_s` beyond its deadline. When it ends the instance opens itself.
    """

    def __init__(
        self,
        table: EpisodeTable,
        *,
        grace_s: float = 10.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._table = table
        self._grace_s = grace_s
        self._clock = clock
        self._sleep = sleep
        self._phase = Phase.IDLE
        self._checkpoint: str | None = None
        self._lease_until = 0.0
        self._watcher: asyncio.Task[None] | None = None
        self._stale: dict[str, None] = {}
        self._exported: Exported | None = None
        self._restored: tuple[str, tuple[EpisodeRecord, ...]] | None = None

    @property
    def instance(self) -> str:
        """The table's instance."""
        return self._table.instance

    async def status(self) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return self._status()

    async def prepare(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """See `EnvironmentControl.prepare`."""
        self._check_deadline(checkpoint_id, deadline_ts)
        if not self._enter(checkpoint_id, deadline_ts, Phase.PREPARING):
            self._expect("prepare", Phase.PREPARING, Phase.PREPARED, Phase.COMMITTED)
            self._lengthen(deadline_ts)
        if self._phase is not Phase.PREPARING:
            return self._status()
        parked = await self._parks_before(deadline_ts)
        self._owns(checkpoint_id)  # it may have been resumed meanwhile
        if not parked:
            self._reopen()
            raise EnvironmentRefusal(
                "deadline_exceeded", f"an episode of '{self.instance}' reached no turn boundary for {checkpoint_id!r}"
            )
        if self._phase is Phase.PREPARING:
            self._phase = Phase.PREPARED
        return self._status()

    async def renew(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """See `EnvironmentControl.renew`."""
        self._owns(checkpoint_id)
        self._lengthen(deadline_ts)
        return self._status()

    async def commit(self, checkpoint_id: str, deadline_ts: float) -> Exported:
        """See `EnvironmentControl.commit`."""
        self._owns(checkpoint_id)
        self._expect("commit", Phase.PREPARED, Phase.COMMITTED)
        self._check_deadline(checkpoint_id, deadline_ts)
        self._lengthen(deadline_ts)
        if self._exported is None:
            self._exported = Exported(self.instance, checkpoint_id, *self._table.export())
            self._phase = Phase.COMMITTED
        return self._exported

    async def restore(
        self, checkpoint_id: str, deadline_ts: float, episodes: Sequence[EpisodeRecord]
    ) -> InstanceStatus:
        """See `EnvironmentControl.restore`."""
        self._check_deadline(checkpoint_id, deadline_ts)
        if self._phase is not Phase.IDLE:
            self._owns(checkpoint_id)
            self._expect("restore", Phase.RESTORED)
            if self._restored != (checkpoint_id, tuple(episodes)):
                raise EnvironmentRefusal("checkpoint_conflict", f"{checkpoint_id!r} restored other episodes before")
            self._lengthen(deadline_ts)
            return self._status()
        self._refuse_stale(checkpoint_id)
        if len(self._table):
            raise EnvironmentRefusal(
                "invalid_phase", f"'{self.instance}' has {len(self._table)} live episodes; retire them before a restore"
            )
        self._table.adopt(episodes)
        self._restored = (checkpoint_id, tuple(episodes))
        self._enter(checkpoint_id, deadline_ts, Phase.RESTORED)
        return self._status()

    async def discard_restored(self, checkpoint_id: str) -> InstanceStatus:
        """See `EnvironmentControl.discard_restored`; works after the lease has ended too."""
        if self._checkpoint not in (None, checkpoint_id):
            self._owns(checkpoint_id)
        if self._restored is not None and self._restored[0] == checkpoint_id:
            self._table.retire(EpisodeId(record.rollout_id, record.attempt + 1) for record in self._restored[1])
            self._restored = None
        elif self._checkpoint == checkpoint_id:
            self._expect("discard_restored", Phase.RESTORED)
        self._give_up(checkpoint_id)
        self._reopen()
        return self._status()

    async def resume(self, checkpoint_id: str) -> InstanceStatus:
        """See `EnvironmentControl.resume`. A prepare of this id that is still on its way will be refused."""
        if self._checkpoint not in (None, checkpoint_id):
            self._owns(checkpoint_id)
        self._give_up(checkpoint_id)
        self._reopen()
        return self._status()

    async def retire(self, episodes: Sequence[EpisodeId]) -> None:
        """See `EnvironmentControl.retire`."""
        self._table.retire(episodes)

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """See `EnvironmentControl.forget`."""
        self._table.forget(rollout_ids)

    def _enter(self, checkpoint_id: str, deadline_ts: float, phase: Phase) -> bool:
        """Begin a checkpoint and close the table; False when it has begun already."""
        self._refuse_stale(checkpoint_id)
        if self._checkpoint is not None:
            self._owns(checkpoint_id)
            return False
        self._phase, self._checkpoint, self._exported = phase, checkpoint_id, None
        self._lease_until = deadline_ts + self._grace_s
        self._table.hold()
        self._watcher = asyncio.create_task(self._watch_lease())
        return True

    def _reopen(self) -> None:
        """Whatever was under way is over: its id is stale, its watcher ends with it, the table is open."""
        if self._checkpoint is not None:
            self._give_up(self._checkpoint)
        if self._watcher is not None and self._watcher is not asyncio.current_task():
            self._watcher.cancel()
        self._phase, self._checkpoint, self._exported, self._watcher = Phase.IDLE, None, None, None
        self._lease_until = 0.0
        self._table.release()

    async def _watch_lease(self) -> None:
        while (left := self._lease_until - self._clock()) > 0:
            await self._sleep(left)
        self._reopen()

    async def _parks_before(self, deadline_ts: float) -> bool:
        if self._table.is_parked:
            return True
        parked = asyncio.ensure_future(self._table.wait_until_parked())
        late = asyncio.ensure_future(self._sleep(deadline_ts - self._clock()))
        try:
            await asyncio.wait({parked, late}, return_when=asyncio.FIRST_COMPLETED)
            return self._table.is_parked
        finally:
            parked.cancel()
            late.cancel()

    def _lengthen(self, deadline_ts: float) -> None:
        self._lease_until = max(self._lease_until, deadline_ts + self._grace_s)

    def _owns(self, checkpoint_id: str) -> None:
        """Refuse an id that is not the one under way."""
        if self._checkpoint == checkpoint_id:
            return
        self._refuse_stale(checkpoint_id)
        if self._checkpoint is None:
            raise EnvironmentRefusal("invalid_phase", f"'{self.instance}' is idle; prepare {checkpoint_id!r} first")
        raise EnvironmentRefusal(
            "checkpoint_conflict", f"'{self.instance}' is at checkpoint {self._checkpoint!r}, not {checkpoint_id!r}"
        )

    def _give_up(self, checkpoint_id: str) -> None:
        """Remember an id that may not come again; the oldest are forgotten."""
        self._stale[checkpoint_id] = None
        while len(self._stale) > _REMEMBERED_IDS:
            del self._stale[next(iter(self._stale))]

    def _refuse_stale(self, checkpoint_id: str) -> None:
        if checkpoint_id in self._stale:
            raise EnvironmentRefusal(
                "stale_checkpoint", f"{checkpoint_id!r} was given up or resumed by '{self.instance}'; begin a new one"
            )

    def _expect(self, verb: str, *phases: Phase) -> None:
        if self._phase not in phases:
            known = " or ".join(phases)
            raise EnvironmentRefusal("invalid_phase", f"{verb} needs {known}, '{self.instance}' is {self._phase}")

    def _check_deadline(self, checkpoint_id: str, deadline_ts: float) -> None:
        if deadline_ts <= self._clock():
            raise EnvironmentRefusal("deadline_exceeded", f"the deadline of {checkpoint_id!r} has passed already")

    def _status(self) -> InstanceStatus:
        left = 0.0 if self._phase is Phase.IDLE else max(0.0, self._lease_until - self._clock())
        return InstanceStatus(self.instance, self._phase, self._checkpoint, len(self._table), self._table.parked, left)
