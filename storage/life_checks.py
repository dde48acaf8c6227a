"""What the events of one controller process must come to: each has the one before it, and happens once.

    group_reserved -> group_admitted -> attempt_dispatched | attempt_resumed -> attempt_sealed, for each sibling
        -> group_published -> train_step;  train_step -> weight_sync

After a restore the earlier ones may lie in the lives below. A group that the restored ledger holds is `redispatched`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from storage.audit_findings import Needs, Suspicion
from storage.history import Event, Life, trained_step
from storage.records import rollout_id
from storage.trace_index import DROPS, STARTS, TraceIndex, group_of

_ENDS = ("attempt_sealed", "attempt_abandoned", "attempt_refused")
_ONCE = ("group_reserved", "group_admitted", "attempt_sealed", "group_published", "train_step", *DROPS)


@dataclass(frozen=True, slots=True)
class LifeEvents:
    """The events of a life (`own`) and of the lives that it stands on (`below`). `copied`: the run began as a fork's
    copy, which holds only what led to its cut.
    """

    life: Life
    own: TraceIndex
    below: TraceIndex
    copied: bool

    @property
    def restored_step(self) -> int:
        """The train step that the restored bundle describes; 0 for an empty start."""
        return 0 if self.life.restored is None else int(self.life.restored.get("step", 0))

    @property
    def model_step(self) -> int:
        """The train step of the restored model."""
        told = {} if self.life.restored is None else self.life.restored
        return self.restored_step - int(told.get("steps_to_replay", 0))

    def sealed(self, rollout: str) -> Sequence[Event]:
        """Every result of a rollout that its publication may rest on."""
        own = self.own.of(rollout, "attempt_sealed")
        return own or self.below.of(rollout, "attempt_sealed")

    def is_known(self, rollout_or_group: str, *kinds: str) -> bool:
        """Whether such an event is there; for a group that the ledger was restored with, in a life below."""
        if self.own.has(rollout_or_group, *kinds):
            return True
        group = group_of(rollout_or_group) or rollout_or_group
        restored = self.own.has(group, "redispatched")
        return restored and (self.copied or self.below.has(rollout_or_group, *kinds))

    def is_promised(self, group: str) -> bool:
        """Whether a group of the ledger was reserved here, or restored. What the ledger was restored with is launched
        again before anything else, unless the process ended before; a finished group is promised again by a bundle
        that saves no rows.
        """
        if self.is_known(group, "group_reserved"):
            return True
        launched = next(self.own.about("redispatched"), None) is not None
        finished = self.own.has(group, "group_published") or self.below.has(group, "group_published")
        return (finished or not launched) and (self.copied or self.below.has(group, "group_reserved"))

    def was_sealed(self, rollout: str) -> bool:
        """Whether a result is traced. A fork's copy leaves out those of the groups that it was made with."""
        if self.own.has(rollout, "attempt_sealed") or self.below.has(rollout, "attempt_sealed"):
            return True
        group = group_of(rollout)
        return self.copied and not self.own.has(group, "group_reserved") and not self.below.has(group, "group_reserved")


def life_suspicions(events: LifeEvents) -> Iterator[Suspicion]:
    """All that is wrong with the events of one life."""
    yield from _twice(events)
    yield from _out_of_order(events)
    yield from _attempts(events)
    yield from _interruptions(events)
    yield from _published(events)
    yield from _half_published(events)
    yield from _trained(events)
    yield from _steps(events)


def _twice(events: LifeEvents) -> Iterator[Suspicion]:
    for kind in _ONCE:
        for about in events.own.about(kind):
            if len(events.own.of(about, kind)) > 1:
                yield Suspicion("events recorded twice by one process", f"{kind} {about}")


def _out_of_order(events: LifeEvents) -> Iterator[Suspicion]:
    """Groups that were admitted without a reservation, attempts without an admission, results without an attempt."""
    started = {group_of(rollout) for rollout in events.own.about(*STARTS)}
    worked = {*events.own.about("group_admitted"), *started}
    for group in sorted(worked):
        if not events.is_known(group, "group_reserved"):
            yield Suspicion("groups without a traced reservation", group, _needs(events, group))
    for group in sorted(started):
        if not events.is_known(group, "group_admitted"):
            yield Suspicion("groups without a traced admission", group, _needs(events, group))
    for result in events.own.all("attempt_sealed"):
        begun = {event["attempt"] for event in events.own.of(result["rollout_id"], *STARTS)}
        if result["attempt"] not in begun:
            yield Suspicion("results without a traced dispatch", result["rollout_id"], Needs.OWN)


def _attempts(events: LifeEvents) -> Iterator[Suspicion]:
    """An attempt ends before the next one of its rollout starts, before its group is given up for a failure (one that
    is interrupted then has ended too), and only if it was started; attempts are numbered from 0.
    """
    for rollout in events.own.about(*STARTS, "attempt_abandoned"):
        started = {int(event["attempt"]) for event in events.own.of(rollout, *STARTS)}
        ended = {int(event["attempt"]) for event in events.own.of(rollout, *_ENDS)}
        newest, dropped = max(started, default=0), events.own.has(group_of(rollout), "prompt_dropped")
        if dropped and newest in _Sent.of(events.own, rollout).interrupted_now:
            ended.add(newest)
        if {attempt for attempt in started if attempt < newest + dropped} - ended:
            yield Suspicion("attempts without a traced end", rollout, Needs.OWN)
        if events.own.has(group_of(rollout), "group_reserved") and len(started) <= max(started, default=-1):
            yield Suspicion("attempts missing between others", rollout, Needs.OWN)
        failed = (event for event in events.own.of(rollout, "attempt_abandoned") if event["reason"] != "restart")
        if {int(event["attempt"]) for event in failed} - started:
            yield Suspicion("failed attempts without a traced dispatch", rollout, Needs.OWN)


@dataclass(frozen=True, slots=True)
class _Sent:
    """How often one process sent each attempt of a rollout, and how often it came back without a result."""

    sent: Counter[int]
    resumed: Counter[int]
    refused: Counter[int]
    interrupted: Counter[int]

    @classmethod
    def of(cls, own: TraceIndex, rollout: str) -> "_Sent":
        kinds = (STARTS, ("attempt_resumed",), ("attempt_refused",), ("attempt_interrupted",))
        return cls(*(Counter(int(event["attempt"]) for event in own.of(rollout, *kind)) for kind in kinds))

    @property
    def interrupted_now(self) -> set[int]:
        """Attempts that have not gone on after their interruption."""
        back = self.refused + self.interrupted
        return {attempt for attempt in self.interrupted if back[attempt] >= self.sent[attempt]}


def _interruptions(events: LifeEvents) -> Iterator[Suspicion]:
    """An attempt is interrupted only if it was sent, has a result only if it went on, and goes on only if it was
    interrupted, refused or restored.
    """
    for rollout in events.own.about("attempt_interrupted", "attempt_resumed"):
        told = _Sent.of(events.own, rollout)
        restored = int(events.own.has(group_of(rollout), "redispatched"))
        sealed = {int(event["attempt"]) for event in events.own.of(rollout, "attempt_sealed")}
        if told.interrupted.keys() - told.sent.keys():
            yield Suspicion("interrupted attempts without a traced dispatch", rollout, Needs.OWN)
        if sealed & told.interrupted_now:
            yield Suspicion("results of interrupted attempts that did not go on", rollout, Needs.OWN)
        if any(times > told.interrupted[a] + told.refused[a] + restored for a, times in told.resumed.items()):
            yield Suspicion("attempts that went on without an interruption", rollout, Needs.OWN)


def _needs(events: LifeEvents, group: str) -> Needs:
    return Needs.BELOW if events.own.has(group, "redispatched") else Needs.OWN


def _published(events: LifeEvents) -> Iterator[Suspicion]:
    """A publication is what its siblings were sealed with: rewards, tokens, and each of them."""
    for published in events.own.all("group_published"):
        group = published["group_id"]
        results = []
        for index, reward in enumerate(published["rewards"]):
            rollout = rollout_id(group, index)
            found = events.sealed(rollout)
            if events.own.has(rollout, *STARTS):
                found = events.own.of(rollout, "attempt_sealed")
            if not found and not (events.copied and events.own.has(group, "redispatched")):
                yield Suspicion("published rollouts without a traced result", rollout, _needs(events, group))
            elif found and not any(_same_reward(result, reward) for result in found):
                yield Suspicion("published rollouts with another reward than sealed", rollout, Needs.OWN)
            results.append(found)
        masked = any(events.own.has(rollout_id(group, i), "rollout_masked") for i in range(len(results)))
        yield from _tokens(published, results, joined=not masked)


def _same_reward(result: Event, reward: float) -> bool:
    """Rows hold float32."""
    return "reward" not in result or np.float32(result["reward"]) == np.float32(reward)


def _tokens(published: Event, results: Sequence[Sequence[Event]], *, joined: bool) -> Iterator[Suspicion]:
    """The tokens of a group are those of its results; those of masked rows have no version."""
    if "num_tokens" not in published:
        return
    group, tokens = published["group_id"], int(published["num_tokens"])
    with_version = sum(count for _, count in published["version_tokens"])
    if with_version > tokens:
        yield Suspicion("groups with more tokens by version than in all", group)
    if all(results):
        sums = {0}
        for found in results:
            sums = {total + int(result["num_tokens"]) for total in sums for result in found}
        if joined and tokens not in sums or tokens > max(sums):
            yield Suspicion("groups published with other tokens than sealed", group, Needs.OWN)


def _half_published(events: LifeEvents) -> Iterator[Suspicion]:
    """Both events of a publication are recorded at once: only the very end of a trace can part them."""
    newest = events.life.events[-1]
    for sealed in events.own.all("group_sealed"):
        if sealed is not newest and not events.own.has(sealed["group_id"], "group_published"):
            yield Suspicion("finished groups without a traced publication", sealed["group_id"], Needs.OWN)
    for published in events.own.all("group_published"):
        if "rollout_sha256" in published and not events.own.has(published["group_id"], "group_sealed"):
            yield Suspicion("publications of groups that were not finished", published["group_id"], Needs.OWN)


def _trained(events: LifeEvents) -> Iterator[Suspicion]:
    """What a step trained was published, not dropped, and sampled under no later weights than it was trained at."""
    for event in events.own.all("train_step"):
        step = trained_step(event)
        for group in step.group_ids:
            ran_here = events.own.has(group, "group_reserved", "redispatched")
            source = events.own if ran_here or events.own.has(group, "group_published") else events.below
            published = source.of(group, "group_published")
            if not published:
                yield Suspicion(
                    "trained groups without a traced publication", group, Needs.OWN if ran_here else Needs.BELOW
                )
            elif min(_newest_version(publication) for publication in published) > step.version:
                yield Suspicion("groups trained at an older version than their tokens", group, Needs.OWN)
            if events.own.has(group, *DROPS):
                yield Suspicion("groups that were dropped and trained", group)


def _newest_version(published: Event) -> int:
    return max((int(version) for version, _ in published["version_tokens"]), default=0)


def _steps(events: LifeEvents) -> Iterator[Suspicion]:
    """Steps follow one another, weights are those of a step, and no step is trained before the generators were given
    the weights of the one before it. What a process does before its restore is complete is not looked at.
    """
    steps = [int(event["step"]) for event in events.life.events if event["event"] == "train_step"]
    seen = Counter(steps)
    expected = range(events.model_step + 1, max(steps, default=events.model_step) + 1)
    for step in expected:
        if step not in seen:
            yield Suspicion("train steps missing between others", str(step), Needs.OWN)
    newest, synced = events.restored_step, {events.model_step}
    published: list[tuple[Event, int]] = []
    for event in events.life.events:
        if event["event"] == "train_step":
            newest = max(newest, int(event["version"]))
            if int(event["version"]) - 1 not in synced and _tells_weights(events):
                yield Suspicion("train steps without the weights of the one before", str(event["step"]), Needs.OWN)
        elif event["event"] == "weight_sync":
            synced.add(int(event["version"]))
            if int(event["version"]) > newest:
                yield Suspicion("weights of a train step that was not traced", str(event["version"]), Needs.OWN)
        elif event["event"] == "group_published":
            published.append((event, newest))
    yield from _versions(published, synced, newest, events.restored_step)


def _tells_weights(events: LifeEvents) -> bool:
    return any(event["event"] == "weight_sync" for event in events.life.events)


def _versions(
    published: Sequence[tuple[Event, int]], synced: set[int], newest: int, restored: int
) -> Iterator[Suspicion]:
    """`newest` weights may be in use a moment before all generators hold them and the refit is recorded."""
    for event, at_most in published:
        versions = {int(version) for version, _ in event["version_tokens"]}
        if max(versions, default=0) > at_most:
            yield Suspicion("groups published with tokens of weights to come", event["group_id"], Needs.OWN)
        unknown = {v for v in versions if v > restored and v not in synced and v < newest}
        if unknown:
            yield Suspicion("groups with tokens of weights that were never given out", event["group_id"], Needs.OWN)
