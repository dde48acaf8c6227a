"""Where a run stands, told by its trace alone: followed event by event, also over restarts."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from storage.errors import NotFound
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.trace_files import ProcessTrace, events_of_process, of_every_process
from storage.trace_lines import parsed

Event = Mapping[str, Any]


class TraceFollower:
    """Reads what was added to a run's traces since the last look. A line that is still being written waits; a trace
    that was compacted meanwhile goes on where its lines ended.
    """

    def __init__(self, store: Store, layout: RunLayout) -> None:
        self._store = store
        self._layout = layout
        self._offsets: dict[str, int] = {}
        self._seen: Counter[str] = Counter()
        self._done: set[str] = set()

    def poll(self) -> list[Event]:
        """New events of all processes, by time."""
        found = of_every_process(self._store, self._layout, self._new_events)
        return sorted((event for events in found for event in events), key=lambda event: float(event["t"]))

    def _new_events(self, trace: ProcessTrace) -> list[Event]:
        process = trace.process
        if process in self._done:
            return []
        if trace.index is not None:
            self._done.add(process)
            return list(islice(events_of_process(self._store, trace), self._seen[process], None))
        events = [event for path in trace.sources for event in self._new_lines(path)]
        self._seen[process] += len(events)
        return events

    def _new_lines(self, path: str) -> list[Event]:
        offset = self._offsets.get(path, 0)
        local = self._store.local_path(path)
        if local is not None:
            try:
                with local.open("rb") as file:
                    file.seek(offset)
                    data = file.read()
            except FileNotFoundError as error:
                raise NotFound(f"{path} is not there any more") from error
        elif offset:  # object stores hold segments that never change
            return []
        else:
            data = self._store.read(path)
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(whole)
        return [event for line in whole.splitlines() if (event := parsed(line)) is not None]


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
