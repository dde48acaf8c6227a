"""What happened to a run, replayed from its trace: lives of its controllers, and the steps that still count.

Each controller process is one *life*. It starts empty or from a restored bundle, so that what an earlier life did
after that bundle's cut is rolled back: the run's effective history is the newest life on top of the bundles below.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage.manifests import BrokenSlot, Manifest

Event = Mapping[str, Any]

# How the writer of a fork's copies begins. Its trace holds what led to the copied cut, and no more.
COPY_PREFIX = "fork-"

# A process that did none of this died before it was a controller: it undid nothing.
WORK = frozenset({"checkpoint_restored", "group_reserved", "attempt_dispatched", "group_published", "train_step"})


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One committed train step. `version` is the trainer's version before it: the one it was trained at."""

    step: int
    t: float
    version: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """One controller process: its events in order, and the bundle it restored (None: it started empty)."""

    run_process: str
    events: Sequence[Event]
    restored: Event | None

    @property
    def is_copy(self) -> bool:
        """Whether it is no process, but what a fork copied: steps, publications, drops and running attempts."""
        return self.run_process.startswith(COPY_PREFIX)

    @property
    def has_all_events(self) -> bool:
        """Whether its store took every event. What a kill lost is not known here."""
        return all(event["event"] != "trace_lost" for event in self.events)

    @property
    def started_at(self) -> float:
        """Time of the first event, in Unix seconds."""
        return float(self.events[0]["t"])

    @property
    def ended_at(self) -> float:
        """Time of the last event, in Unix seconds."""
        return float(self.events[-1]["t"])


@dataclass(frozen=True, slots=True)
class Segment:
    """A life up to a cut (Unix seconds), at which a bundle of it was restored or is looked at."""

    life: Life
    cut_time: float

    @property
    def is_whole(self) -> bool:
        """Whether the trace surely holds all that led to the cut. A kill may lose the last events of a process, and a
        store that takes none for long any of them.
        """
        return self.life.has_all_events and self.cut_time <= self.life.ended_at


@dataclass(frozen=True, slots=True)
class Running:
    """An attempt that runs in a process since `began` (Unix seconds); an interruption after which it went on counts."""

    attempt: int
    began: float


@dataclass(slots=True)
class Standing:
    """Where a run stands at one moment: trained steps in order, and since when unsealed attempts run, by rollout.

    A step that one life recorded twice is in `steps` twice: that is a fault, to be seen by the audit.
    """

    steps: list[TrainedStep] = field(default_factory=list)
    running: dict[str, "Running"] = field(default_factory=dict)


class History:
    """The lives of a run. `slots` is its manifest log, which says where each restored bundle was cut."""

    def __init__(self, events: Sequence[Event], slots: Iterable[Manifest | BrokenSlot]) -> None:
        self._manifests = {slot.sequence: slot for slot in slots if isinstance(slot, Manifest)}
        self.lives = _lives(events, self._manifests)
        self.events = events

    @property
    def manifests(self) -> list[Manifest]:
        """Those of the log that can be read, in its order."""
        return list(self._manifests.values())

    def manifest(self, sequence: int) -> Manifest | None:
        """The manifest of a bundle, which stays when its payload is retired; None when it can't be read."""
        return self._manifests.get(sequence)

    def now(self) -> Standing:
        """Where the newest life stands at its last event."""
        return self._end_of(self.lives[-1]) if self.lives else Standing()

    def at_cut(self, sequence: int) -> Standing:
        """Where the run stood when a bundle was cut: steps up to the bundle's, attempts running at its cut.

        Steps are chosen by number, since a step is recorded a moment after its commit.
        """
        manifest = self._manifests.get(sequence)
        life = None if manifest is None else self._life_of(manifest)
        if manifest is None or life is None:
            return Standing()
        cut_time = cut_time_of(manifest)
        standing = self._base_of(life)
        for event in life.events:
            if event["event"] == "train_step" and int(event["step"]) <= manifest.step:
                standing.steps.append(trained_step(event))
            elif float(event["t"]) <= cut_time:
                _apply_attempt(standing, event)
        return standing

    @property
    def is_of_fork(self) -> bool:
        """Whether the run began as a copy, so that what led to that is with its source."""
        return any(manifest.writer.startswith(COPY_PREFIX) for manifest in self.manifests)

    def writer_of(self, manifest: Manifest) -> Life | None:
        """The life that wrote a bundle; None when it left no trace."""
        return next((life for life in self.lives if life.run_process == manifest.writer), None)

    def below(self, life: Life) -> list["Segment"]:
        """What a life stands on, newest first: earlier lives, each up to the cut that the next one restored."""
        found: list[Segment] = []
        while (segment := self._restored_by(life)) is not None and segment.life not in [s.life for s in found]:
            found.append(segment)
            life = segment.life
        return found

    def _restored_by(self, life: Life) -> "Segment | None":
        if life.restored is None or life.restored["sequence"] is None:
            return None
        manifest = self._manifests.get(int(life.restored["sequence"]))
        writer = None if manifest is None else self.writer_of(manifest)
        return None if manifest is None or writer is None else Segment(writer, cut_time_of(manifest))

    def _end_of(self, life: Life) -> Standing:
        standing = self._base_of(life)
        for event in life.events:
            if event["event"] == "train_step":
                standing.steps.append(trained_step(event))
            _apply_attempt(standing, event)
        return standing

    def _base_of(self, life: Life) -> Standing:
        """Steps up to the model that the life started from; nothing is running yet."""
        if life.restored is None or life.restored["sequence"] is None:
            return Standing()
        steps = self.at_cut(int(life.restored["sequence"])).steps
        anchor = life.restored.get("anchor_sequence")
        model = self._manifests.get(int(anchor)) if anchor is not None else None
        last = model.step if model is not None else 0
        return Standing(steps=[step for step in steps if step.step <= last])

    def _life_of(self, manifest: Manifest) -> Life | None:
        """The life that wrote a bundle: the one that carries its writer's name, else the one of its time."""
        named = [life for life in self.lives if life.run_process == manifest.writer]
        earlier = [life for life in self.lives if life.started_at <= manifest.created_at]
        found = named or earlier
        return found[-1] if found else None


def cut_time_of(manifest: Manifest) -> float:
    """When a bundle was cut, in Unix seconds."""
    return manifest.cut_time if manifest.cut_time is not None else manifest.created_at


def trained_step(event: Event) -> TrainedStep:
    """A `train_step` event, whose `version` is the trainer's version after the step."""
    return TrainedStep(int(event["step"]), float(event["t"]), int(event["version"]) - 1, tuple(event["group_ids"]))


def _apply_attempt(standing: Standing, event: Event) -> None:
    kind = event["event"]
    if kind in ("attempt_dispatched", "attempt_resumed"):
        running, attempt = standing.running.get(event["rollout_id"]), int(event["attempt"])
        if running is None or running.attempt != attempt:
            standing.running[event["rollout_id"]] = Running(attempt, float(event["t"]))
    elif kind in ("attempt_sealed", "attempt_abandoned", "attempt_refused"):
        standing.running.pop(event["rollout_id"], None)
    elif kind in ("group_discarded", "prompt_dropped"):
        for rollout in [r for r in standing.running if r.rpartition("_g")[0] == event["group_id"]]:
            del standing.running[rollout]


def _lives(events: Sequence[Event], manifests: Mapping[int, Manifest]) -> list[Life]:
    """In the order of the log, where each controller claimed the run before it did anything: clocks of several machines
    say little. By time when one of them is not in the log.
    """
    by_process: dict[str, list[Event]] = {}
    for event in events:
        by_process.setdefault(event["run_process"], []).append(event)
    worked = {event["run_process"] for event in events if event["event"] in WORK}
    lives = [_life(process, own) for process, own in by_process.items() if process in worked]
    first = {manifests[sequence].writer: sequence for sequence in sorted(manifests, reverse=True)}
    if all(life.run_process in first for life in lives):
        return sorted(lives, key=lambda life: first[life.run_process])
    return sorted(lives, key=lambda life: life.started_at)


def _life(process: str, events: Sequence[Event]) -> Life:
    """A restore that was tried again in one process counts once: the last one, with what follows it."""
    places = [place for place, event in enumerate(events) if event["event"] == "checkpoint_restored"]
    if not places:
        return Life(process, events, None)
    opening = [event for event in events[: places[-1]] if event["event"] == "run_started"]
    return Life(process, [*opening, *events[places[-1] :]], events[places[-1]])


def steps_of(events: Iterable[Event]) -> Iterator[TrainedStep]:
    """Every train step ever recorded, rolled back or not, in the order of the trace."""
    return (trained_step(event) for event in events if event["event"] == "train_step")
