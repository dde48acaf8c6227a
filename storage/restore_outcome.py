"""What a restore came to: the figures of its plan again, from the trace of the process that was restored."""

from dataclasses import dataclass

from storage.history import Event, History, Life
from storage.manifests import Manifest
from storage.records import rollout_id
from storage.restore_figures import Lost, RestoreFigures, busy_s
from storage.trace_index import DROPS, group_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a restore has come to so far. `is_complete`: everything that was launched again is sealed or given up."""

    figures: RestoreFigures
    is_complete: bool


def outcome_of(history: History, life: Life) -> Outcome | None:
    """What the restore that a process began with came to; None for one that started empty."""
    told = life.restored
    target = None if told is None or told["sequence"] is None else history.manifest(int(told["sequence"]))
    if told is None or target is None:
        return None
    again, continued = _RunAgain.of(life), _Continued.of(life, told)
    turn_tokens = _turn_tokens(told, target)
    before = history.lives[: history.lives.index(life)]
    dropped = _dropped_by(history, life)
    lost = Lost.after(before, history, target)
    replayed = [event for event in life.events if event["event"] == "train_step" and event.get("replayed")]
    figures = RestoreFigures(
        groups_reused=int(told.get("groups_buffered", 0)),
        groups_unfinished=int(told.get("groups_unfinished", 0)),
        siblings_reused=int(told.get("siblings_reused", 0)),
        siblings_resumed=int(told.get("siblings_resumed", 0)),
        siblings_rerun=int(told.get("siblings_rerun", 0)),
        turns_kept=int(told.get("turns_kept", 0)),
        turn_tokens=turn_tokens,
        calls_continued=continued.calls,
        tokens_continued=continued.tokens,
        tokens_kept=int(told.get("tokens_kept", 0)) - continued.tokens_discarded,
        steps_to_replay=len(replayed),
        replay_s=sum(busy_s(event) for event in replayed),
        tokens_to_generate=max(0, again.tokens - turn_tokens - continued.tokens),
        generation_s=again.seconds,
        attempts_dropped=len(dropped),
        tokens_dropped=_tokens_sealed(history, life, dropped),
        steps_lost=lost.steps_beyond(int(told.get("step", 0))),
        tokens_lost=lost.tokens,
        lost_s=lost.seconds,
    )
    return Outcome(figures, again.is_complete and len(replayed) == int(told.get("steps_to_replay", 0)))


@dataclass(frozen=True, slots=True)
class _RunAgain:
    """The siblings that were launched again after a restore: tokens of those sealed, and how long that took."""

    tokens: int
    seconds: float
    is_complete: bool

    @classmethod
    def of(cls, life: Life) -> "_RunAgain":
        launched = [event for event in life.events if event["event"] == "redispatched"]
        owed = {rollout_id(event["group_id"], index) for event in launched for index in event["siblings"]}
        sealed = [e for e in life.events if e["event"] == "attempt_sealed" and e["rollout_id"] in owed]
        given_up = {event["group_id"] for event in life.events if event["event"] in DROPS}
        open_ones = owed - {event["rollout_id"] for event in sealed}
        return cls(
            tokens=sum(int(event["num_tokens"]) for event in sealed),
            seconds=max(0.0, float(sealed[-1]["t"]) - float(launched[0]["t"])) if sealed else 0.0,
            is_complete=all(group_of(rollout) in given_up for rollout in open_ones),
        )


@dataclass(frozen=True, slots=True)
class _Continued:
    """The model calls that went on where they were, without those that a generator could not continue."""

    calls: int
    tokens: int
    tokens_discarded: int

    @classmethod
    def of(cls, life: Life, told: Event) -> "_Continued":
        """What the restore gave to the generators, less what they discarded of it. What is discarded of a rollout that
        was interrupted again meanwhile is no tokens of the restore.
        """
        discarded: dict[str, int] = {}
        interrupted: set[str] = set()
        for event in life.events:
            if event["event"] == "attempt_interrupted":
                interrupted.add(event["rollout_id"])
            elif event["event"] == "prefix_discarded" and event["rollout_id"] not in {*discarded, *interrupted}:
                discarded[event["rollout_id"]] = int(event["tokens"])
        tokens = sum(discarded.values())
        return cls(
            calls=max(0, int(told.get("calls_continued", 0)) - len(discarded)),
            tokens=max(0, int(told.get("tokens_continued", 0)) - tokens),
            tokens_discarded=tokens,
        )


def _turn_tokens(told: Event, target: Manifest) -> int:
    """The restore counts all tokens that it kept, those of continued calls for themselves too; the manifest, which
    stays, those of groups and of sealed siblings.
    """
    counts = target.counts
    others = counts.get("reusable_tokens", 0) + counts.get("buffered_tokens", 0) * bool(told.get("groups_buffered", 0))
    others += int(told.get("tokens_continued", 0))
    return max(0, int(told.get("tokens_kept", 0)) - others)


def _dropped_by(history: History, life: Life) -> set[tuple[str, int]]:
    """Rollouts and attempts that the restore abandoned; that is recorded before it is complete."""
    return {
        (event["rollout_id"], int(event["attempt"]))
        for event in history.events
        if event["event"] == "attempt_abandoned"
        and event["run_process"] == life.run_process
        and event["reason"] == "restart"
    }


def _tokens_sealed(history: History, life: Life, attempts: set[tuple[str, int]]) -> int:
    """Tokens of those of the attempts that were sealed before the cut: later ones are lost with the rest."""
    sealed = {
        (event["rollout_id"], int(event["attempt"])): int(event["num_tokens"])
        for segment in history.below(life)
        for event in segment.life.events
        if event["event"] == "attempt_sealed" and float(event["t"]) <= segment.cut_time
    }
    return sum(sealed.get(attempt, 0) for attempt in attempts)
