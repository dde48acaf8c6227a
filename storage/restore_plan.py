"""What a restore will reuse, run again and drop: from the bundle and the trace's own rates, before anything is paid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.history import History
from storage.records import AttemptStatus, LedgerGroup, SealedSibling, rollout_id
from storage.restore_figures import Lost, RestoreFigures, busy_s
from storage.snapshot_reader import RestoredBundle
from storage.trace_index import STARTS


@dataclass(frozen=True, slots=True)
class Rates:
    """What the run has done so far, per unit; None before it has done any.

    `tokens_per_attempt` = tokens of sealed attempts / sealed attempts. `tokens_per_s` = those tokens / sum over
    processes of the time from their first dispatch to their last sealed attempt. `step_s` = mean seconds of a train
    step, without the wait for its groups.
    """

    tokens_per_attempt: float | None
    tokens_per_s: float | None
    step_s: float | None

    @classmethod
    def of(cls, history: History) -> "Rates":
        """The rates of all processes of a run."""
        tokens = attempts = 0
        generating_s = 0.0
        steps: list[float] = []
        for life in history.lives:
            sealed = [event for event in life.events if event["event"] == "attempt_sealed"]
            started = [float(event["t"]) for event in life.events if event["event"] in STARTS]
            tokens += sum(int(event["num_tokens"]) for event in sealed)
            attempts += len(sealed)
            if sealed and started:
                generating_s += max(0.0, float(sealed[-1]["t"]) - started[0])
            steps += [busy_s(event) for event in life.events if event["event"] == "train_step" and "seconds" in event]
        return cls(
            tokens_per_attempt=tokens / attempts if attempts else None,
            tokens_per_s=tokens / generating_s if generating_s else None,
            step_s=sum(steps) / len(steps) if steps else None,
        )


def plan_of(bundle: RestoredBundle, history: History, *, keeps_buffer: bool = True) -> RestoreFigures:
    """What a restore of this bundle will come to. `keeps_buffer`: `checkpointing.load_replay_buffer`; without it the
    finished groups are run again too.
    """
    state, rates = bundle.state, Rates.of(history)
    going_on = _Resumed.all_of(bundle)
    kept = [_Kept.of(group, going_on) for group in state.ledger]
    buffered = state.buffer if keeps_buffer else ()
    discarded = () if keeps_buffer else state.buffer
    steps = state.progress.train_steps - state.model_step
    rerun = sum(one.rerun for one in kept) + sum(len(group.row_ids) for group in discarded)
    resumed = [sibling for one in kept for sibling in one.resumed]
    to_generate = _tokens_to_generate(rates, rerun, [sibling.tokens for sibling in resumed])
    lost = Lost.after(history.lives, history, bundle.manifest)
    return RestoreFigures(
        groups_reused=len(buffered),
        groups_unfinished=len(state.ledger) + len(discarded),
        siblings_reused=sum(one.reused for one in kept),
        siblings_resumed=len(resumed),
        siblings_rerun=rerun,
        turns_kept=sum(sibling.turns for sibling in resumed),
        turn_tokens=sum(sibling.turn_tokens for sibling in resumed),
        calls_continued=sum(sibling.call_tokens > 0 for sibling in resumed),
        tokens_continued=sum(sibling.call_tokens for sibling in resumed),
        tokens_kept=sum(finished.num_tokens for finished in buffered)
        + sum(one.tokens for one in kept)
        + sum(sibling.tokens for sibling in resumed),
        steps_to_replay=steps,
        replay_s=_seconds(steps, rates.step_s),
        tokens_to_generate=to_generate,
        generation_s=_generation_s(to_generate, rates),
        attempts_dropped=sum(one.dropped for one in kept) + sum(len(group.row_ids) for group in discarded),
        tokens_dropped=sum(one.dropped_tokens for one in kept) + sum(group.num_tokens for group in discarded),
        steps_lost=lost.steps_beyond(state.progress.train_steps),
        tokens_lost=lost.tokens,
        lost_s=lost.seconds,
    )


@dataclass(frozen=True, slots=True)
class _Resumed:
    """A sibling that goes on in its middle: tokens sampled in its finished turns, and in the call after them."""

    turns: int
    turn_tokens: int
    call_tokens: int

    @property
    def tokens(self) -> int:
        """All that it has already."""
        return self.turn_tokens + self.call_tokens

    @classmethod
    def all_of(cls, bundle: RestoredBundle) -> "dict[str, _Resumed]":
        """Those of a bundle, by rollout."""
        episodes = {episode.rollout_id: episode for episode in bundle.state.episodes}
        calls = {call.rollout_id: call.num_tokens for call in bundle.state.partial_calls}
        return {
            rollout: cls(
                turns=0 if (episode := episodes.get(rollout)) is None else episode.turn,
                turn_tokens=0 if episode is None else sum(_tokens_of(bundle, key) for key in episode.calls),
                call_tokens=calls.get(rollout, 0),
            )
            for rollout in (*episodes, *(calls.keys() - episodes.keys()))
        }


@dataclass(frozen=True, slots=True)
class _Kept:
    """One unfinished group after a restart. `tokens`: those of its sealed siblings that are reused."""

    reused: int
    tokens: int
    resumed: tuple[_Resumed, ...]
    rerun: int
    dropped: int
    dropped_tokens: int

    @classmethod
    def of(cls, group: LedgerGroup, going_on: Mapping[str, _Resumed]) -> "_Kept":
        sealed = [sibling.sealed for sibling in group.siblings if sibling.sealed is not None]
        keeps = group.level.keeps_siblings
        open_ones = [sibling for sibling in group.siblings if sibling.sealed is None]
        resumed = tuple(
            going_on[rollout]
            for sibling in open_ones
            if (rollout := rollout_id(group.group_id, sibling.generation_index)) in going_on
        )
        started = sum(sibling.status is not AttemptStatus.RESERVED for sibling in open_ones)
        gone: Sequence[SealedSibling] = () if keeps else sealed
        return cls(
            reused=len(sealed) if keeps else 0,
            tokens=sum(result.num_tokens for result in sealed) if keeps else 0,
            resumed=resumed,
            rerun=len(group.siblings) - (len(sealed) if keeps else 0) - len(resumed),
            dropped=started - len(resumed) + len(gone),
            dropped_tokens=sum(result.num_tokens for result in gone),
        )


def _tokens_of(bundle: RestoredBundle, key: str) -> int:
    row = bundle.rows[key]
    return len(row.batch.column("token_ids")[row.index])


def _tokens_to_generate(rates: Rates, rerun: int, kept_tokens: Sequence[int]) -> int | None:
    """Each attempt is as long as the mean of those that were sealed; `kept_tokens` of each resumed one are there."""
    if not rerun and not kept_tokens:
        return 0
    if rates.tokens_per_attempt is None:
        return None
    return round(
        rerun * rates.tokens_per_attempt + sum(max(0.0, rates.tokens_per_attempt - done) for done in kept_tokens)
    )


def _generation_s(tokens: int | None, rates: Rates) -> float | None:
    if tokens == 0:
        return 0.0
    return None if tokens is None or not rates.tokens_per_s else tokens / rates.tokens_per_s


def _seconds(count: int, each: float | None) -> float | None:
    if count == 0:
        return 0.0
    return None if each is None else count * each
