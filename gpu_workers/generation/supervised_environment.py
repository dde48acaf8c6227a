"""The environment inside a generator that may die and be started again: one instance under one name."""

from collections.abc import Callable, Sequence

from gpu_workers.environments.ports import EnvironmentControl, EpisodeId, Exported, InstanceStatus, Phase
from storage.errors import InfrastructureFailure
from storage.records import EpisodeRecord


def instance_name(index: int) -> str:
    """How the environment in generator `index` is called."""
    return f"generator-{index}"


class SupervisedEnvironment:
    """`EnvironmentControl` of the living generator; of one that is down nothing runs, so that it holds nothing up."""

    def __init__(self, index: int, living: Callable[[], EnvironmentControl | None]) -> None:
        self._name = instance_name(index)
        self._living = living

    @property
    def instance(self) -> str:
        """The same for all processes that this generator ever is."""
        return self._name

    async def status(self) -> InstanceStatus:
        """See `EnvironmentControl`."""
        live = self._living()
        return self._nothing() if live is None else await live.status()

    async def prepare(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """See `EnvironmentControl`."""
        live = self._living()
        return self._nothing() if live is None else await live.prepare(checkpoint_id, deadline_ts)

    async def renew(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """See `EnvironmentControl`."""
        live = self._living()
        return self._nothing() if live is None else await live.renew(checkpoint_id, deadline_ts)

    async def commit(self, checkpoint_id: str, deadline_ts: float) -> Exported:
        """See `EnvironmentControl`."""
        live = self._living()
        return (
            Exported(self._name, checkpoint_id, (), ())
            if live is None
            else await live.commit(checkpoint_id, deadline_ts)
        )

    async def restore(
        self, checkpoint_id: str, deadline_ts: float, episodes: Sequence[EpisodeRecord]
    ) -> InstanceStatus:
        """See `EnvironmentControl`; InfrastructureFailure while the generator is down."""
        live = self._living()
        if live is None:
            raise InfrastructureFailure(
                f"{self._name} is being started again and can't take {len(episodes)} episodes yet"
            )
        return await live.restore(checkpoint_id, deadline_ts, episodes)

    async def discard_restored(self, checkpoint_id: str) -> InstanceStatus:
        """See `EnvironmentControl`."""
        live = self._living()
        return self._nothing() if live is None else await live.discard_restored(checkpoint_id)

    async def resume(self, checkpoint_id: str) -> InstanceStatus:
        """See `EnvironmentControl`."""
        live = self._living()
        return self._nothing() if live is None else await live.resume(checkpoint_id)

    async def retire(self, episodes: Sequence[EpisodeId]) -> None:
        """See `EnvironmentControl`."""
        if (live := self._living()) is not None:
            await live.retire(episodes)

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """See `EnvironmentControl`."""
        if (live := self._living()) is not None:
            await live.forget(rollout_ids)

    def _nothing(self) -> InstanceStatus:
        return InstanceStatus(self._name, Phase.IDLE, None, 0, 0, 0.0)
