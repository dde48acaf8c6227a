"""One restore in numbers, planned or actual, and the same side by side in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.history import Event, History, Life, cut_time_of
from storage.manifests import Manifest


@dataclass(frozen=True, slots=True)
class RestoreFigures:
    """One restore in numbers. Seconds are of wall-clock time; None where nothing is known yet.

    Reused: finished groups, sealed siblings, and of the `siblings_resumed` finished turns, for which `turn_tokens` were
    sampled, and `calls_continued` in their middle, after `tokens_continued`; `tokens_kept` are those of all. Run again:
    the recorded batches (`steps_to_replay` in `replay_s`), and in `generation_s` the `siblings_rerun`, which have
    nothing to go on from, with those resumed: `tokens_to_generate` in all. Dropped: the `attempts_dropped` that had
    begun or were sealed and are not kept, with the `tokens_dropped` of the sealed ones; and what was done after the
    cut, in `lost_s`: `steps_lost` beyond the restored step, and `tokens_lost` of attempts that were sealed.
    """

    groups_reused: int
    groups_unfinished: int
    siblings_reused: int
    siblings_resumed: int
    siblings_rerun: int
    turns_kept: int
    turn_tokens: int
    calls_continued: int
    tokens_continued: int
    tokens_kept: int
    steps_to_replay: int
    replay_s: float | None
    tokens_to_generate: int | None
    generation_s: float | None
    attempts_dropped: int
    tokens_dropped: int
    steps_lost: int
    tokens_lost: int
    lost_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """What the last process before a restore did after the restored cut."""

    events: Sequence[Event]
    seconds: float

    @classmethod
    def after(cls, lives: Sequence[Life], history: History, target: Manifest) -> "Lost":
        """`lives`: those before the restore."""
        if not lives:
            return cls((), 0.0)
        last, cut_time = lives[-1], cut_time_of(target)
        is_writer = history.writer_of(target) is last
        events = [event for event in last.events if not is_writer or float(event["t"]) > cut_time]
        return cls(events, max(0.0, max(life.ended_at for life in lives) - cut_time))

    @property
    def tokens(self) -> int:
        """Tokens of attempts that were sealed."""
        return sum(int(event["num_tokens"]) for event in self.events if event["event"] == "attempt_sealed")

    def steps_beyond(self, step: int) -> int:
        """Train steps after this one."""
        return len({int(e["step"]) for e in self.events if e["event"] == "train_step" and int(e["step"]) > step})


def busy_s(step: Event) -> float:
    """Seconds of a train step without the wait for its groups."""
    return max(0.0, float(step["seconds"]) - float(step.get("waited_s", 0.0)))


_WORDS = {
    "groups_reused": "finished groups, reused",
    "groups_unfinished": "unfinished groups, continued",
    "siblings_reused": "sealed siblings, reused",
    "siblings_resumed": "siblings, resumed in the middle",
    "turns_kept": "finished turns of these, kept",
    "turn_tokens": "tokens of these turns, kept",
    "calls_continued": "model calls of these, continued where they were",
    "tokens_continued": "tokens of these calls, kept",
    "tokens_kept": "tokens, kept in all",
    "siblings_rerun": "siblings, run from their start",
    "tokens_to_generate": "tokens, still to generate for the unfinished groups",
    "generation_s": "seconds, for these",
    "steps_to_replay": "train steps, trained again from recorded batches",
    "replay_s": "seconds, for these steps",
    "attempts_dropped": "attempts at the cut, dropped",
    "tokens_dropped": "tokens of those that were sealed, dropped",
    "steps_lost": "train steps after the cut, lost",
    "tokens_lost": "tokens sealed after the cut, lost",
    "lost_s": "seconds between the cut and the stop",
}


def side_by_side(plan: RestoreFigures | None, actual: RestoreFigures | None) -> list[tuple[str, str, str]]:
    """What, planned and actual, in words and in the order in which a person reads them; empty where not known."""
    return [(what, _shown(plan, name), _shown(actual, name)) for name, what in _WORDS.items()]


def _shown(figures: RestoreFigures | None, name: str) -> str:
    value = None if figures is None else getattr(figures, name)
    if value is None:
        return ""
    return f"{value:,.1f}" if name.endswith("_s") else f"{value:,}"
