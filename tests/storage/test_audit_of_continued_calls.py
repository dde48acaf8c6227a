"""The audit of attempts that were interrupted and went on: one attempt each, with the tokens that were saved."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from storage.audit_evidence import Evidence
from storage.history import History
from storage.manifests import Manifest
from storage.records import (
    AttemptStatus,
    Progress,
    RecoveryLevel,
    RolloutState,
    RowKind,
    SealedSibling,
    Sibling,
    call_key,
)

ROLLOUT = "e0-p1_g0"
KEY = call_key(ROLLOUT, attempt=0, turn=0)


class Told:
    """A trace that is told event by event, and bundles of one group at level `prefix` that are cut in between."""

    def __init__(self, open_run: Any, store: Any, make: Any) -> None:
        self._open_run, self._store, self.make = open_run, store, make
        self.clock = 100.0
        self.events: list[dict[str, Any]] = []
        self.bundles: list[Manifest] = []
        self.start("first")
        self.tell("group_reserved", group_id="e0-p1")
        self.tell("group_admitted", group_id="e0-p1")

    def start(self, process: str, restored: Manifest | None = None) -> None:
        self.process, self.run = process, self._open_run(self._store, writer=process).claim()
        self.tell("run_started")
        if restored is not None:
            self.tell("checkpoint_restored", sequence=restored.sequence, anchor_sequence=None, step=0)
            self.tell("redispatched", group_id="e0-p1", siblings=[0])

    def tell(self, event: str, **fields: Any) -> None:
        self.clock += 1
        self.events.append({"t": self.clock, "run_process": self.process, "event": event, **fields})

    def attempt(self, event: str, number: int = 0, **fields: Any) -> None:
        self.tell(f"attempt_{event}", rollout_id=ROLLOUT, attempt=number, **fields)

    def seal(self, number: int = 0) -> None:
        self.attempt("sealed", number, reward=0.5, num_tokens=6)

    def cut(self, sibling: Sibling, rows: dict[str, Any] | None = None, **state: Any) -> Manifest:
        group, _ = self.make.ledger_group(1, sealed=0, level=RecoveryLevel.PREFIX)
        group = replace(group, siblings=(sibling, Sibling(1)))
        self.clock += 1
        whole = RolloutState(Progress(), ledger=(group,), **state)
        self.bundles.append(self.run.writer.write(self.run.bundle(whole, rows or {}, cut_time=self.clock)))
        return self.bundles[-1]

    def cut_running(self, *, cuts: tuple[int, ...] = (2, 4), attempt: int = 0) -> Manifest:
        """A snapshot of the sibling in the middle of its call."""
        sibling = Sibling(0, attempt, AttemptStatus.DISPATCHED)
        group, _ = self.make.ledger_group(1, sealed=0, level=RecoveryLevel.PREFIX)
        call, rows = self.make.partial_call(replace(group, siblings=(sibling,)), 0, cuts=cuts)
        rows = {key: self._of_first_weights(row) for key, row in rows.items()}
        return self.cut(sibling, rows, partial_calls=(call,))

    def _of_first_weights(self, row: Any) -> Any:
        plain = row.batch.slice(row.index, 1).to_pylist()[0]
        return self.make.row(RowKind.PARTIAL_TOKENS, {**plain, "versions": [0]})

    def cut_sealed(self, *, calls: Sequence[int] = (0,), **changes: Any) -> Manifest:
        """A snapshot with the result, which begins with the saved tokens; `calls`: the attempt of each of its calls."""
        plain = {
            **{"rollout_id": ROLLOUT, "group_id": "e0-p1", "parent_key": None, "prompt_token_ids": [1, 2]},
            **{"token_ids": list(range(100, 106)), "logprobs": [-0.5 - place for place in range(6)]},
            **{"version_starts": [0], "versions": [0], "finish_reason": "stop", **changes},
        }
        rows = [
            self.make.row(
                RowKind.STAGED_CALL,
                {**plain, "row_id": call_key(ROLLOUT, attempt=attempt, turn=turn), "attempt": attempt, "turn": turn},
            )
            for turn, attempt in enumerate(calls)
        ]
        result = SealedSibling(tuple(r.row_id for r in rows), tuple(r.digest for r in rows), 0.5, False, 6)
        return self.cut(Sibling(0, 0, AttemptStatus.SEALED, sealed=result), {r.row_id: r for r in rows})

    def cut_published(self, **changes: Any) -> Manifest:
        """A snapshot with the finished group, whose first training row holds the result of the call."""
        group, rows = self.make.buffered(1)
        plain = rows[ROLLOUT].batch.slice(0, 1).to_pylist()[0]
        plain |= {"token_ids": [1, 2, *range(100, 106)], "loss_mask": [False] * 2 + [True] * 6}
        plain |= {"logprobs": [0.0] * 2 + [-0.5 - place for place in range(6)], "versions": [-1, 0], **changes}
        rows[ROLLOUT] = self.make.row(RowKind.TRAINING_ROW, plain)
        group = replace(group, version_tokens=((0, 6), (3, 2)))
        self.clock += 1
        state = RolloutState(Progress(train_steps=3, next_order=1), buffer=(group,))
        self.bundles.append(self.run.writer.write(self.run.bundle(state, rows, cut_time=self.clock)))
        return self.bundles[-1]

    def found(self) -> set[str]:
        """What the audit suspects of any life and any bundle."""
        history = History(self.events, self.run.log.read())
        evidence = self.evidence = Evidence(history)
        told = [*evidence.of_lives()]
        for bundle in self.bundles:
            told += evidence.of_bundle(self.run.read(bundle))
        return {suspicion.what for suspicion, _ in told}


@pytest.fixture
def told(open_run: Any, memory_store: Any, make: Any) -> Told:
    return Told(open_run, memory_store, make)


def test_an_attempt_that_goes_on_after_its_generator_died_is_one_attempt(told: Told) -> None:
    told.attempt("dispatched")
    told.attempt("interrupted", reason="infrastructure", tokens=4)
    told.attempt("resumed", turns=0, tokens=4)
    told.attempt("refused", message="closed")
    told.attempt("resumed", turns=0, tokens=4)
    told.attempt("interrupted", reason="infrastructure", tokens=5)
    told.attempt("resumed", turns=0, tokens=5)
    told.seal()
    assert told.found() == set()


def test_an_attempt_that_is_interrupted_in_several_processes_is_one_attempt(told: Told) -> None:
    told.attempt("dispatched")
    told.cut_running(cuts=(2,))
    told.attempt("interrupted", reason="infrastructure", tokens=4)
    told.attempt("resumed", turns=0, tokens=4)
    told.start("second", told.cut_running(cuts=(2, 4)))
    told.attempt("resumed", turns=0, tokens=4)
    told.start("third", told.cut_running(cuts=(2, 4, 5)))
    told.attempt("resumed", turns=0, tokens=5)
    told.seal()
    told.cut_sealed()
    assert told.found() == set()
    assert told.evidence.calls_compared == 1


def test_a_result_of_an_interrupted_attempt_that_did_not_go_on_is_found(told: Told) -> None:
    told.attempt("dispatched")
    told.attempt("interrupted", reason="infrastructure", tokens=4)
    told.seal()
    assert told.found() == {"results of interrupted attempts that did not go on"}


def test_an_interruption_of_what_was_never_sent_is_found(told: Told) -> None:
    told.attempt("dispatched")
    told.attempt("interrupted", 1, reason="infrastructure", tokens=4)
    assert told.found() == {"interrupted attempts without a traced dispatch"}


def test_an_attempt_that_goes_on_without_reason_is_found(told: Told) -> None:
    told.attempt("dispatched")
    told.attempt("resumed", turns=0, tokens=4)
    told.seal()
    assert told.found() == {"attempts that went on without an interruption"}


def test_an_attempt_that_was_interrupted_last_has_ended_when_its_prompt_is_dropped(told: Told) -> None:
    told.attempt("dispatched")
    told.attempt("interrupted", reason="infrastructure", tokens=4)
    told.tell("prompt_dropped", group_id="e0-p1", reason="interrupted too often", target_step=1, place="lost")
    assert told.found() == set()


def test_an_attempt_that_went_on_has_not_ended_when_its_prompt_is_dropped(told: Told) -> None:
    told.attempt("dispatched")
    told.attempt("interrupted", reason="infrastructure", tokens=4)
    told.attempt("resumed", turns=0, tokens=4)
    told.tell("prompt_dropped", group_id="e0-p1", reason="interrupted too often", target_step=1, place="lost")
    assert told.found() == {"attempts without a traced end"}


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [100, 101, 102, 999, 104, 105]},
        {"logprobs": [-0.5, -1.5, -2.5, -9.5, -4.5, -5.5]},
        {"version_starts": [0, 3], "versions": [0, 1]},
        {"token_ids": [100, 101], "logprobs": [-0.5, -1.5]},
    ],
)
def test_a_call_that_does_not_go_on_with_what_was_saved_is_found(told: Told, changes: dict[str, Any]) -> None:
    """Token by token, with its log-probability and weight version."""
    told.attempt("dispatched")
    told.cut_running(cuts=(2, 4))
    told.seal()
    told.cut_sealed(**changes)
    assert told.found() == {"model calls that do not go on with the tokens that were saved"}


def _published(told: Told) -> None:
    told.tell("attempt_dispatched", rollout_id="e0-p1_g1", attempt=0)
    told.tell("attempt_sealed", rollout_id="e0-p1_g1", attempt=0, reward=1.1, num_tokens=2)
    told.tell("group_sealed", group_id="e0-p1")
    tokens = {"version_tokens": [[0, 6], [3, 2]], "rewards": [0.1, 1.1]}
    told.tell("group_published", group_id="e0-p1", **tokens)


_WHOLE = "groups published with tokens of weights to come"  # of the other row: no step is trained here


def test_a_training_row_begins_with_the_tokens_that_were_saved(told: Told) -> None:
    told.attempt("dispatched")
    told.cut_running()
    told.attempt("sealed", reward=0.1, num_tokens=6)
    _published(told)
    told.cut_published()
    assert told.found() == {_WHOLE}
    told.cut_published(logprobs=[0.0] * 8)
    assert told.found() == {_WHOLE, "model calls that do not go on with the tokens that were saved"}


def test_a_training_row_of_another_attempt_than_was_sealed_is_found(told: Told) -> None:
    told.attempt("dispatched")
    told.cut_running()
    told.attempt("sealed", reward=0.1, num_tokens=6)
    _published(told)
    told.cut_published(attempt=1)
    assert told.found() == {_WHOLE, "rows of other attempts than were sealed"}


def test_a_call_whose_tokens_were_discarded_may_come_to_others(told: Told) -> None:
    told.attempt("dispatched")
    told.cut_running()
    told.tell("prefix_discarded", rollout_id=ROLLOUT, attempt=0, tokens=4, reason="the prompt differs")
    told.seal()
    told.cut_sealed(token_ids=[7] * 6)
    assert told.found() == set()


def test_a_call_that_a_restore_took_back_may_come_to_others(told: Told) -> None:
    """The second process stands on a bundle from before the call began."""
    before = told.cut(Sibling(0))
    told.attempt("dispatched")
    told.cut_running()
    told.start("second", before)
    told.attempt("dispatched")
    told.seal()
    told.cut_sealed(token_ids=[7] * 6)
    assert told.found() == set()
    assert told.evidence.calls_compared == 0


def test_a_result_that_mixes_calls_of_two_attempts_is_found(told: Told) -> None:
    told.attempt("dispatched")
    told.seal()
    told.cut_sealed(calls=(0, 1))
    assert told.found() == {"results with calls of several attempts"}


def test_a_partial_call_of_an_attempt_that_was_never_sent_is_found(told: Told) -> None:
    told.cut_running()
    found = told.found()
    assert "partial calls of attempts that were never dispatched" in found


def test_tokens_of_weights_that_no_step_has_made_are_found_in_a_partial_call(told: Told, make: Any) -> None:
    told.attempt("dispatched")
    group, _ = make.ledger_group(1, sealed=0, level=RecoveryLevel.PREFIX)
    call, rows = make.partial_call(group, 0)
    told.cut(Sibling(0, status=AttemptStatus.DISPATCHED), rows, partial_calls=(call,))
    assert told.found() == {"partial calls with tokens of weights to come"}
