"""Planted faults: what is taken from, put into or changed in the trace or the bundles of a run that was killed and went
on is found, and what a kill or a store may have lost is not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from storage.audit import Audit, account_for
from storage.history import History
from storage.manifests import read_log
from storage.records import DroppedPrompt, RowKind
from storage.rows import RowHandle
from storage.schemas import row_digest
from storage.snapshot_reader import RestoredBundle, read_bundle

# Nothing rests on these: what they tell is known from the manifests, or only they tell it.
_NOT_NEEDED = {"checkpoint_published", "run_ended", "snapshot_attempt"}


@dataclass
class Told:
    """What trace, manifests and dataset say of a run; the audit of a changed copy of it."""

    events: list[dict[str, Any]]
    log: Sequence[Any]
    bundles: list[RestoredBundle]
    prompts: list[Any]

    def audit(self, events: Sequence[dict[str, Any]] | None = None, newest: RestoredBundle | None = None) -> Audit:
        *older, last = self.bundles
        history = History(self.events if events is None else events, self.log)
        return account_for(history, newest or last, older, order=self._order)

    def changed(self, which: dict[str, Any], *, nth: int = 0, **fields: Any) -> Audit:
        """Other fields in the nth event that has these values."""
        events = [dict(event) for event in self.events]
        self._find(events, which, nth).update(fields)
        return self.audit(events)

    def without(self, *gone: dict[str, Any]) -> Audit:
        return self.audit([event for event in self.events if not any(event is other for other in gone)])

    def event(self, *, nth: int = 0, **which: Any) -> dict[str, Any]:
        return self._find(self.events, which, nth)

    def _find(self, events: list[dict[str, Any]], which: dict[str, Any], nth: int) -> dict[str, Any]:
        found = [event for event in events if which.items() <= event.items()]
        return found[nth]

    def _order(self, epoch: int) -> list[int]:
        return [prompt.prompt_id for prompt in self.prompts if prompt.epoch == epoch]


@pytest.fixture
async def told(make_world, data_failure) -> Told:
    """Two lives. The first is killed beyond its checkpoint of step 2: its last snapshot holds a dropped prompt, step 3
    as a recorded batch, finished groups, sealed siblings and running ones. The second trains step 3 again and goes on.
    """
    sections = {"async_rl": {"on_dropped_prompt": "shrink"}, "checkpointing": {"save_period": 2}}
    world = make_world(**sections, algorithm={"max_steps": 8}, data={"num_prompts": 80})
    world.boot()
    world.generator.failures = {f"{world.passed_by(7)[-1]}_g1": [data_failure] * 20}
    late = set(world.passed_by(80)) - set(world.passed_by(16))
    world.generator.held = lambda group_id, index: index == 1 and group_id in late
    controller = await world.restore(world.plan())
    await world.train(1, 3)
    await world.settle(lambda: controller.describe()["sealed_siblings"] > 2)
    await world.snapshot(1, force=True)
    await world.kill()
    controller = await world.start()
    await world.train(3, 5)
    await world.settle(lambda: len(controller.parts.buffer) == 4)
    await world.snapshot(2, force=True)
    await world.kill()
    audit = world.audit()
    assert (audit.problems, audit.unproven, audit.unread) == ([], (), ())
    log = read_log(world.store, world.layout)
    bundles = [read_bundle(world.store, world.layout, log[sequence]) for sequence in audit.bundles]
    events = sorted((event for _, trace in world.lives for event in trace.events), key=lambda event: event["t"])
    return Told(events, log, bundles, world._first(80))


def test_the_run_itself_is_without_a_fault_and_every_row_that_was_trained_was_sealed(told):
    audit = told.audit()
    assert audit.problems == []
    assert (audit.lives, audit.steps_rolled_back) == (2, 1)
    assert audit.pairs_trained == audit.pairs_sealed == 2 * (4 + 3 + 4 + 4 + 4)
    state = told.bundles[-1].state
    held = {"trained": 19, "replay_buffer": len(state.buffer), "ledger": len(state.ledger), "dropped": 1}
    assert audit.owners == {**held, "spare_prompts": 0}
    assert len(told.bundles) == 4


def test_the_loss_of_any_single_event_that_something_rests_on_is_found(told):
    unseen = [
        event
        for number, event in enumerate(told.events)
        if event["event"] not in _NOT_NEEDED
        and not told.audit([*told.events[:number], *told.events[number + 1 :]]).problems
    ]
    found = Counter(event["event"] for event in told.events) - Counter(event["event"] for event in unseen)
    assert {"group_reserved", "group_admitted", "attempt_dispatched", "attempt_sealed", "group_published"} < set(found)
    assert {"train_step", "prompt_dropped", "weight_sync", "checkpoint_restored", "redispatched"} < set(found)
    assert all(_rests_nothing_on(event, told) for event in unseen)


def _rests_nothing_on(event: dict[str, Any], told: Told) -> bool:
    """Weights that a process began or ended with, what a restore threw away, promises that no bundle has yet."""
    own = [e for e in told.events if e["run_process"] == event["run_process"]]
    match event["event"]:
        case "weight_sync":
            versions = [e["version"] for e in own if e["event"] == "weight_sync"]
            return event["version"] in (versions[0], versions[-1])
        case "attempt_abandoned":
            return event["reason"] == "restart"
        case "group_reserved":
            about = [e for e in own if e.get("group_id") == event["group_id"]]
            return len(about) == 1 and event["t"] > told.bundles[-1].manifest.cut_time
    return False


@pytest.mark.parametrize(
    "kind", ["group_reserved", "group_admitted", "attempt_sealed", "group_published", "train_step", "prompt_dropped"]
)
def test_an_event_that_one_process_recorded_twice_is_found(told, kind):
    twin = dict(told.event(event=kind))
    (first, *_) = [finding for finding in told.audit([*told.events, twin]).found if "twice by one" in finding.what]
    assert first.ids[0].startswith(kind)


def test_a_doubled_training_is_found_with_each_generation(told):
    steps = [event for event in told.events if event["event"] == "train_step"]
    again = steps[0]["group_ids"][0]
    audit = told.changed({"event": "train_step", "step": 4}, group_ids=[*steps[-2]["group_ids"][:-1], again])
    assert audit.trained_twice == (f"{again}_g0", f"{again}_g1")
    assert audit.owned_twice == (again,)


def test_a_skipped_prompt_is_found(told):
    newest = told.bundles[-1]
    gone = newest.state.buffer[0].group_id
    state = replace(newest.state, buffer=newest.state.buffer[1:])
    assert told.audit(newest=replace(newest, state=state)).problems == [f"1 prompts skipped: {gone}"]


def test_a_foreign_group_in_a_bundle_is_found(told):
    group = told.bundles[-1].state.buffer[0].group_id
    known = [event for event in told.events if event.get("rollout_id", "").rpartition("_g")[0] == group]
    known += [event for event in told.events if event.get("group_id") == group]
    assert f"1 groups in bundles that were never published: {group}" in told.without(*known).problems


def _with_row(bundle: RestoredBundle, row_id: str, **values: Any) -> RestoredBundle:
    """The bundle with other values in one row, whose digest is right."""
    handle = bundle.rows[row_id]
    row = {**handle.batch.slice(handle.index, 1).to_pylist()[0], **values}
    row["digest"] = row_digest(RowKind.TRAINING_ROW, row)
    batch = pa.RecordBatch.from_pylist([row], schema=handle.batch.schema)
    return replace(bundle, rows={**bundle.rows, row_id: RowHandle(handle.kind, batch, 0, row["digest"])})


def test_a_foreign_row_in_a_finished_group_is_found(told):
    group = told.bundles[-1].state.buffer[0]
    audit = told.audit(newest=_with_row(told.bundles[-1], group.row_ids[0], finish_reason="length"))
    assert audit.problems == [f"1 groups in bundles that differ from what was published: {group.group_id}"]


def test_a_foreign_row_in_a_recorded_batch_is_found(told):
    entry = told.bundles[-1].state.trained[0]
    audit = told.audit(newest=_with_row(told.bundles[-1], entry.group.row_ids[0], finish_reason="length"))
    assert f"1 recorded batches that differ from what was trained: {entry.step}" in audit.problems


def test_rows_of_other_weights_than_their_record_says_are_found(told):
    group = told.bundles[-1].state.buffer[0]
    row = told.bundles[-1].rows[group.row_ids[0]]
    versions = [v if v < 0 else v + 1 for v in row.batch.column("versions")[row.index].as_py()]
    audit = told.audit(newest=_with_row(told.bundles[-1], group.row_ids[0], versions=versions))
    assert f"1 groups whose rows have other token versions than their record: {group.group_id}" in audit.problems


def test_a_recorded_batch_in_another_order_is_found(told):
    newest = told.bundles[-1]
    first, second, *others = newest.state.trained
    swapped = (replace(first, position=second.position), replace(second, position=first.position), *others)
    audit = told.audit(newest=replace(newest, state=replace(newest.state, trained=swapped)))
    assert audit.problems == [f"1 recorded batches that differ from what was trained: {first.step}"]


CHANGES = {
    "another reward": ("group_published", {"rewards": [0.25, 0.75]}, "another reward than sealed"),
    "other tokens": ("group_published", {"num_tokens": 1}, "more tokens by version than in all"),
    "more tokens": ("group_published", {"num_tokens": 999}, "published with other tokens than sealed"),
    "weights to come": ("group_published", {"version_tokens": [[99, 1]]}, "tokens of weights to come"),
    "other rows": ("group_published", {"rollout_sha256": "0" * 64}, "differ from what was published"),
    "another result": ("attempt_sealed", {"digest": "0" * 64}, "differ from what was sealed"),
    "another attempt": ("attempt_sealed", {"attempt": 7}, "results without a traced dispatch"),
    "another batch": ("train_step", {"rollouts_sha256": "0" * 64}, "differ from what was trained"),
    "another reason": ("prompt_dropped", {"reason": "no reason"}, "another reason than traced"),
    "an older trainer": ("train_step", {"version": 1}, "older version than their tokens"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_fact_is_found(told, change):
    kind, fields, what = CHANGES[change]
    state = told.bundles[-1].state
    which: dict[str, Any] = {"event": kind}
    if kind == "group_published":
        which["group_id"] = state.buffer[0].group_id
    elif kind == "train_step":
        which |= {"step": state.trained[0].step, "run_process": "incarnation-2"}
    elif kind == "attempt_sealed":
        older = next(
            bundle for bundle in told.bundles if any(s.sealed for g in bundle.state.ledger for s in g.siblings)
        )
        group = next(group for group in older.state.ledger if group.siblings[0].sealed)
        which["rollout_id"] = f"{group.group_id}_g0"
    found = told.changed(which, **fields).problems
    assert any(what in problem for problem in found), found


def test_a_drop_that_no_bundle_holds_and_one_that_no_event_explains_are_found(told):
    newest = told.bundles[-1]
    dropped = newest.state.dropped[0]
    forgotten = told.audit(newest=replace(newest, state=replace(newest.state, dropped=())))
    assert f"1 traced drops that the bundle does not hold: {dropped.prompt.group_id}" in forgotten.problems
    assert forgotten.skipped == (dropped.prompt.group_id,)
    another = DroppedPrompt(newest.state.buffer[0].prompt, "nobody knows", None)
    state = replace(newest.state, dropped=(dropped, another), buffer=newest.state.buffer[1:])
    unexplained = told.audit(newest=replace(newest, state=state))
    assert unexplained.problems == [f"1 dropped prompts without a traced reason: {another.prompt.group_id}"]


def test_a_group_that_was_dropped_and_trained_is_found(told):
    group = told.event(event="train_step", step=5)["group_ids"][0]
    drop = {**told.event(event="prompt_dropped"), "group_id": group, "t": told.events[-1]["t"] + 1}
    drop["run_process"] = "incarnation-2"
    assert told.audit([*told.events, drop]).problems == [f"1 groups that were dropped and trained: {group}"]


def test_what_a_store_did_not_take_is_no_fault_and_is_told(told):
    gone = told.event(event="attempt_sealed", run_process="incarnation-2")
    assert told.without(gone).problems
    lost = {**told.event(event="run_ended", nth=-1), "event": "trace_lost", "events": 1}
    audit = told.audit([*(event for event in told.events if event is not gone), lost])
    assert audit.problems == []
    assert gone["rollout_id"] in {about for finding in audit.unproven for about in finding.ids}


def test_a_store_that_did_not_take_events_excuses_no_contradiction(told):
    lost = {**told.event(event="run_ended", nth=-1), "event": "trace_lost", "events": 1}
    twin = dict(told.event(event="group_published", run_process="incarnation-2"))
    assert told.audit([*told.events, twin, lost]).problems


def test_the_last_events_before_a_kill_are_no_fault_although_a_bundle_was_cut_after_them(told):
    snapshot = next(b.manifest for b in told.bundles if b.manifest.kind == "rollout_snapshot")
    own = [event for event in told.events if event["run_process"] == snapshot.writer]
    for lost in range(1, 12):
        tail = [event for event in own if event["t"] <= snapshot.cut_time][-lost:]
        kept = [event for event in told.events if event["t"] < tail[0]["t"] or event["run_process"] != snapshot.writer]
        audit = told.audit(kept)
        assert audit.problems == []
    assert audit.unproven, "what was saved after the last event has no other witness"


def test_the_loss_of_a_whole_process_is_found_by_the_bundles_that_it_wrote(told):
    audit = told.without(*(event for event in told.events if event["run_process"] == "incarnation-2"))
    written = [bundle.manifest.sequence for bundle in told.bundles if bundle.manifest.writer == "incarnation-2"]
    assert f"{len(written)} bundles of processes without a trace: " + ", ".join(f"{n:08d}" for n in written) in (
        audit.problems
    )


def test_what_retention_freed_is_not_missed(told):
    told.bundles = told.bundles[-1:]
    assert told.audit().problems == []
