"""Finished groups until they are trained: add -> claim -> drop. Views keep dispatch order."""

from collections.abc import Iterable
from dataclasses import replace

from gpu_workers.controller.barrier import Cut, Mutation
from storage.errors import BrokenInvariant
from storage.records import BufferedGroup


class ReplayBuffer:
    """Owns finished groups. A claimed group stays, and stays saved, until the step that consumes it has committed."""

    def __init__(self) -> None:
        self._groups: dict[str, BufferedGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def ready(self) -> list[BufferedGroup]:
        """Unclaimed groups in dispatch order."""
        return sorted((g for g in self._groups.values() if g.claimed_by is None), key=lambda g: g.order)

    def claimed(self) -> list[BufferedGroup]:
        """Groups that a train step has claimed, in dispatch order."""
        return sorted((g for g in self._groups.values() if g.claimed_by is not None), key=lambda g: g.order)

    def add(self, mutation: Mutation, group: BufferedGroup) -> None:
        """Take over a finished group."""
        mutation.require_live()
        if group.group_id in self._groups:
            raise BrokenInvariant(f"group {group.group_id} is already in the replay buffer")
        self._groups[group.group_id] = group

    def promote(self, mutation: Mutation, group: BufferedGroup, *, target_step: int | None, order: int) -> None:
        """Give a ready group another place: the step it is stamped for, and its place in dispatch order."""
        mutation.require_live()
        current = self._groups.get(group.group_id)
        if current is None or current.claimed_by is not None:
            raise BrokenInvariant(f"group {group.group_id} is promoted to target step {target_step}, but not ready")
        self._groups[group.group_id] = replace(current, target_step=target_step, order=order)

    def claim(self, mutation: Mutation, groups: Iterable[BufferedGroup], *, step: int) -> list[BufferedGroup]:
        """Mark groups as being trained by `step`."""
        mutation.require_live()
        claimed = []
        for group in groups:
            current = self._groups[group.group_id]
            if current.claimed_by is not None:
                raise BrokenInvariant(f"group {group.group_id} is claimed by step {current.claimed_by} and by {step}")
            self._groups[group.group_id] = replace(current, claimed_by=step)
            claimed.append(self._groups[group.group_id])
        return claimed

    def release_claims(self, mutation: Mutation) -> None:
        """Give claimed groups back: the step that claimed them did not commit."""
        mutation.require_live()
        for group in self.claimed():
            self._groups[group.group_id] = replace(group, claimed_by=None)

    def drop(self, mutation: Mutation, groups: Iterable[BufferedGroup]) -> None:
        """Let go of groups that were trained or evicted."""
        mutation.require_live()
        for group in groups:
            del self._groups[group.group_id]

    def capture(self, cut: Cut) -> tuple[BufferedGroup, ...]:
        """All groups in dispatch order; a claim is not part of what is saved, since a restart undoes it."""
        cut.require_live()
        groups = sorted(self._groups.values(), key=lambda g: g.order)
        return tuple(replace(g, claimed_by=None) if g.claimed_by is not None else g for g in groups)

    def load(self, mutation: Mutation, groups: Iterable[BufferedGroup]) -> None:
        """Replace everything by restored groups."""
        mutation.require_live()
        self._groups = {group.group_id: group for group in groups}
