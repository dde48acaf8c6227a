"""Where a run stands, told by its trace alone: followed event by event, also over restarts."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.filesystem import Store
from storage.layout import RunLayout

Event = Mapping[str, Any]


class TraceFollower:
    """Reads what was added to a run's traces since the last look. A line that is still being written waits."""

    def __init__(self, store: Store, layout: RunLayout) -> None:
        self._store = store
        self._layout = layout
        self._offsets: dict[str, int] = {}

    def poll(self) -> list[Event]:
        """New events of all processes, by time."""
        events = [event for path in self._store.list(self._layout.traces) for event in self._new_events(path)]
        return sorted(events, key=lambda event: float(event["t"]))

    def _new_events(self, path: str) -> list[Event]:
        offset = self._offsets.get(path, 0)
        local = self._store.local_path(path)
        if local is not None:
            with local.open("rb") as file:
                file.seek(offset)
                data = file.read()
        elif offset:  # object stores hold segments that never change
            return []
        else:
            data = self._store.read(path)
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(whole)
        return [event for line in whole.splitlines() if (event := _parsed(line)) is not None]


@dataclass(slots=True)
class RunProgress:
    """Rewards and batch ages by step, snapshots and restores of a run. Steps that a restore undid are forgotten.

    `replayed` counts steps that were rolled back and trained again from their recorded batches.
    """

    rewards: dict[int, float] = field(default_factory=dict)
    batch_ages: dict[int, float] = field(default_factory=dict)
    snapshots: int = 0
    checkpoints: int = 0
    replayed: int = 0
    last_bundle: Event | None = None
    last_restore: Event | None = None

    @property
    def step(self) -> int:
        """The newest train step."""
        return max(self.rewards, default=0)

    @property
    def reward(self) -> float | None:
        """Mean reward of the newest step."""
        return self.rewards.get(self.step)

    def add(self, events: Iterable[Event]) -> None:
        """Take further events into account."""
        for event in events:
            match event["event"]:
                case "train_step":
                    self.rewards[int(event["step"])] = float(event["rewards_mean"])
                    self.batch_ages[int(event["step"])] = float(event.get("batch_age", 0.0))
                    self.replayed += bool(event.get("replayed"))
                case "checkpoint_published":
                    self.checkpoints += 1
                    self.last_bundle = event
                case "snapshot_attempt" if event["outcome"] == "completed":
                    self.snapshots += 1
                    self.last_bundle = event
                case "checkpoint_restored":
                    self.last_restore = event
                    self.rewards = {s: r for s, r in self.rewards.items() if s <= int(event["step"])}
                    self.batch_ages = {s: a for s, a in self.batch_ages.items() if s <= int(event["step"])}


def progress_of(store: Store, run: str) -> RunProgress:
    """The progress of a run up to now."""
    progress = RunProgress()
    progress.add(TraceFollower(store, RunLayout(run)).poll())
    return progress


def _parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "t" in event and "event" in event else None
