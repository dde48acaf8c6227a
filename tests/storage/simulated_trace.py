"""A run that is stopped again and again, as its trace tells it, and what happened as the run itself knows it."""

import copy
import random
from dataclasses import dataclass, field
from typing import Any

from storage.canonical import canonical_json
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import Manifest

SIBLINGS = 3
GROUPS_PER_STEP = 2


@dataclass
class Group:
    """One prompt group on its way. Times as recorded; `running` and `sealed` by generation index."""

    prompt: int
    life: int
    reserved_at: float = 0.0
    dispatched_at: float | None = None
    last_seal: tuple[float, float, float] = (0.0, 0.0, 0.0)  # time, generation_s, environment_s
    published_at: float = 0.0
    version_tokens: list[list[int]] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    running: dict[int, float] = field(default_factory=dict)
    interrupted: set[int] = field(default_factory=set)
    sealed: set[int] = field(default_factory=set)

    @property
    def group_id(self) -> str:
        return f"e0-p{self.prompt}"


@dataclass
class State:
    """What a snapshot saves."""

    next_prompt: int = 0
    in_flight: list[Group] = field(default_factory=list)
    buffer: list[Group] = field(default_factory=list)
    step: int = 0
    model_step: int = 0
    recorded: list[list[Group]] = field(default_factory=list)


@dataclass
class Truth:
    """What the analyses must find, by what the simulation knows itself."""

    thrown_away: dict[int, float] = field(default_factory=dict)
    redone: dict[int, list[float]] = field(default_factory=dict)
    retrained: dict[int, list[float]] = field(default_factory=dict)
    ages: dict[int, float] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    stages: dict[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)
    crossed: int = 0
    parked: float = 0.0


class SimulatedRun:
    """Plays lives of random length. `random_of` decides everything, so that a seed is a run."""

    def __init__(self, run: str, seed: int, *, stops: int, events_per_life: int = 240, jitter: float = 1.0) -> None:
        self.run = run
        self.layout = RunLayout(run)
        self.truth = Truth()
        self.events: list[list[dict[str, Any]]] = []
        self.log: list[Manifest] = []
        self._random = random.Random(seed)
        self._jitter = jitter
        self._clock = 1000.0
        self._state = State()
        self._snapshots: dict[int, tuple[State, float]] = {}
        self._ever_sealed: set[tuple[int, int]] = set()
        self._furthest = 0
        for life in range(stops + 1):
            self._begin(life)
            for _ in range(self._random.randrange(events_per_life // 2, events_per_life)):
                self._act()
            self._furthest = max(self._furthest, *(e["step"] for e in self.events[-1] if e["event"] == "train_step"), 0)

    def write(self, store: Store) -> None:
        """One file for each life."""
        for life, events in enumerate(self.events):
            lines = b"".join(canonical_json(event) + b"\n" for event in events)
            store.write(self.layout.trace(f"controller-{life}"), lines)

    def _record(self, event: str, **fields: Any) -> float:
        self._clock += self._random.random() * self._jitter
        head = {"t": self._clock, "run_process": f"life-{self._life}", "event": event}
        self.events[-1].append({**fields, **head})
        return self._clock

    def _publish_manifest(self, cut_time: float) -> int:
        facts = {"sequence": len(self.log), "writer": f"life-{self._life}", "cut_time": cut_time}
        self.log.append(Manifest.model_construct(**facts, created_at=self._clock, step=self._state.step))
        return len(self.log) - 1

    def _begin(self, life: int) -> None:
        self._life = life
        self.events.append([])
        self._clock += 50.0 * self._random.random()
        self._publish_manifest(0.0)  # its claim
        self.truth.redone[life], self.truth.retrained[life] = [], []
        self._record("run_started", incarnation=f"life-{life}")
        newest = max(self._snapshots, default=None)
        if newest is None:
            self._state = State()
            if life:
                self.truth.thrown_away[life] = 0.0
            self._record("group_reserved", group_id="e0-p0", prompt_id=0, epoch=0, batch=0)
            self._state.in_flight.append(Group(0, life, reserved_at=self._clock))
            self._state.next_prompt = 1
            return
        saved, cut_time = self._snapshots[newest]
        self._restore(newest, copy.deepcopy(saved), cut_time)

    def _restore(self, sequence: int, state: State, cut_time: float) -> None:
        steps = len(state.recorded)
        facts = {"sequence": sequence, "step": state.step, "model_step": state.model_step, "steps_to_replay": steps}
        self._record("checkpoint_restored", **facts, cut_time=cut_time, kind="rollout_snapshot")
        self._state, thrown = state, 0.0
        batches, state.recorded, state.step = state.recorded, [], state.model_step
        for batch in batches:
            self._train(batch, replayed=True)
        for group in state.in_flight:
            self._record("redispatched", group_id=group.group_id, siblings=[])
            running, group.running, group.interrupted = dict(group.running), {}, set()
            for index, began in running.items():
                kept = self._random.choice(["nothing", "nothing", "turns", "tokens", "discarded"])
                if kept in ("nothing", "discarded"):
                    thrown += cut_time - began
                if kept == "nothing":
                    group.attempts[index] += 1
                else:
                    self._resume(group, index, kept)
            if self._random.random() < 0.6:  # sealed siblings of a lower level are run again
                group.attempts.update({index: group.attempts[index] + 1 for index in group.sealed})
                group.sealed.clear()
        self.truth.thrown_away[self._life] = thrown

    def _act(self) -> None:
        state, draw = self._state, self._random.random()
        if draw < 0.12 and len(state.in_flight) < 5:
            self._reserve()
        elif draw < 0.8 and state.in_flight:
            self._advance(self._random.choice(state.in_flight))
        elif draw < 0.88 and len(state.buffer) >= GROUPS_PER_STEP:
            self._train([state.buffer.pop(0) for _ in range(GROUPS_PER_STEP)], replayed=False)
        elif draw < 0.895 and state.in_flight:
            group = state.in_flight.pop(self._random.randrange(len(state.in_flight)))
            self._record("group_discarded", group_id=group.group_id, reason="stale", version=state.step)
        elif draw < 0.905 and state.buffer:
            self._record("group_discarded", group_id=state.buffer.pop().group_id, reason="evicted", version=state.step)
        elif draw < 0.95:
            self._save()
        elif draw < 0.97:
            state.model_step, state.recorded = state.step, []
        elif draw < 0.99:
            self.truth.parked += (seconds := self._random.random())
            self._record("environment_parked", seconds=seconds, committed=True)

    def _reserve(self) -> None:
        prompt, self._state.next_prompt = self._state.next_prompt, self._state.next_prompt + 1
        group = Group(prompt, self._life)
        group.reserved_at = self._record("group_reserved", group_id=group.group_id, prompt_id=prompt, epoch=0, batch=0)
        self._record("group_admitted", group_id=group.group_id, target_step=None, start_version=self._state.step)
        self._state.in_flight.append(group)

    def _dispatch(self, group: Group, index: int) -> None:
        group.running[index] = self._record("attempt_dispatched", **self._sibling(group, index))
        group.dispatched_at = group.dispatched_at or self._clock

    def _resume(self, group: Group, index: int, kept: str) -> None:
        """Go on from finished turns, from tokens, or from tokens that the generator cannot continue."""
        facts = {"turns": int(kept == "turns"), "tokens": 3, "environment_attempt": 1}
        t = self._record("attempt_resumed", **self._sibling(group, index), **facts)
        group.running.setdefault(index, t)
        group.dispatched_at = group.dispatched_at or self._clock
        if kept == "discarded":
            about = {"rollout_id": f"{group.group_id}_g{index}", "attempt": group.attempts[index]}
            self._record("prefix_discarded", **about, tokens=3, reason="sampling")

    def _sibling(self, group: Group, index: int) -> dict[str, Any]:
        attempt = group.attempts.setdefault(index, 0)
        names = {"rollout_id": f"{group.group_id}_g{index}", "attempt": attempt, "prompt_id": group.prompt}
        return {**names, "epoch": 0, "generation_index": index}

    def _advance(self, group: Group) -> None:
        """Dispatch what waits, or let one attempt end."""
        waiting = [i for i in range(SIBLINGS) if i not in group.running and i not in group.sealed]
        if waiting:
            self._dispatch(group, waiting[0])
            return
        if group.interrupted:
            self._resume(group, group.interrupted.pop(), "tokens")
            return
        if group.running:
            index, draw = self._random.choice(sorted(group.running)), self._random.random()
            about = {"rollout_id": f"{group.group_id}_g{index}", "attempt": group.attempts[index]}
            if draw < 0.2:
                self._record("attempt_abandoned", **about, reason="data")
                group.attempts[index] += 1
                del group.running[index]
                return
            if draw < 0.3:
                self._record("attempt_interrupted", **about, reason="infrastructure", tokens=3)
                group.interrupted.add(index)
                return
            if draw < 0.35:
                self._record("attempt_refused", **about, message="closed")
                del group.running[index]
                return
            self._seal(group, index)
        if len(group.sealed) == SIBLINGS:
            self._publish(group)

    def _seal(self, group: Group, index: int) -> None:
        seconds = (self._random.random() / 8, self._random.random() / 8)
        facts = {"num_tokens": self._random.randrange(1, 50), "reward": 0.5, "digest": "d"}
        facts |= dict(zip(("generation_s", "environment_s"), seconds, strict=True))
        group.last_seal = (self._record("attempt_sealed", **self._sibling(group, index), **facts), *seconds)
        began = group.running.pop(index)
        if (group.prompt, index) in self._ever_sealed:
            self.truth.redone[self._life].append(self._clock - began)
        self._ever_sealed.add((group.prompt, index))
        group.sealed.add(index)

    def _publish(self, group: Group) -> None:
        version = self._state.step
        spans = {max(0, version - self._random.randrange(3)): self._random.randrange(1, 40) for _ in range(2)}
        group.version_tokens = [[v, n] for v, n in sorted(spans.items())]
        facts = {"prompt_id": group.prompt, "epoch": 0, "version_tokens": group.version_tokens, "rewards": [0.0, 1.0]}
        group.published_at = self._record("group_published", group_id=group.group_id, **facts)
        self._state.in_flight.remove(group)
        self._state.buffer.append(group)

    def _train(self, batch: list[Group], *, replayed: bool) -> None:
        state, truth, version = self._state, self.truth, self._state.step
        pairs = [(v, n) for group in batch for v, n in group.version_tokens]
        age = sum(n * (version - v) for v, n in pairs) / sum(n for _, n in pairs)
        seconds, waited = self._random.random(), self._random.random() / 2
        state.step += 1
        facts = {"step": state.step, "version": state.step, "group_ids": [group.group_id for group in batch]}
        facts |= {"batch_age": age, "seconds": seconds, "waited_s": min(waited, seconds), "replayed": replayed}
        t = self._record("train_step", **facts, rewards_mean=0.5)
        state.recorded.append(batch)
        truth.ages = {step: known for step, known in truth.ages.items() if step < state.step} | {state.step: age}
        for v, n in pairs:
            truth.staleness[version - v] = truth.staleness.get(version - v, 0) + n
        if state.step <= self._furthest:
            truth.retrained[self._life].append(seconds)
        for group in batch:
            self._note_stages(group, t, t - (seconds - facts["waited_s"]))

    def _note_stages(self, group: Group, t: float, began: float) -> None:
        if group.life != self._life:
            self.truth.crossed += 1
            return
        sealed_at, generation, environment = group.last_seal
        assert group.dispatched_at is not None
        began = max(group.published_at, began)
        other = sealed_at - group.dispatched_at - generation - environment
        times = (group.dispatched_at - group.reserved_at, generation, environment, other)
        times += (group.published_at - sealed_at, began - group.published_at, t - began)
        self.truth.stages[(group.group_id, self._life)] = times

    def _save(self) -> None:
        self._snapshots[self._publish_manifest(self._clock)] = (copy.deepcopy(self._state), self._clock)
        self._record("snapshot_attempt", number=1, outcome="completed", reason="", step=self._state.step, cut_ms=0.5)
