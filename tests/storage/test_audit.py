"""Exactly-once accounting over stops and restores, and what the stops cost, against independent sums."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from storage.audit import Audit, account
from storage.filesystem import Store
from storage.manifests import Manifest
from storage.records import DroppedPrompt, Progress, SourcePosition, TrainedGroup, rollout_id
from storage.trace_analysis import stop_cost
from storage.trace_reader import read_events

PROMPTS = 12


class Simulation:
    """A run of steps of two groups with two siblings each, told by its trace; prompts come in order."""

    def __init__(self, store: Store, open_run: Callable[..., Any]) -> None:
        self.store = store
        self._open_run = open_run
        self._lives = 0
        self.clock = 100.0
        self.start()

    def start(self, restored: Manifest | None = None, *, anchor: Manifest | None = None) -> None:
        """A new controller process, on top of a bundle or empty."""
        self._lives += 1
        self.run = self._open_run(self.store, writer=f"life-{self._lives}").claim()
        self.run.make.version = 0
        self._lines: list[str] = []
        self._known: set[str] = set()
        self._attempts: dict[str, int] = {}
        self.clock += 10
        self.record("run_started")
        if restored is not None:
            self.record(
                "checkpoint_restored",
                sequence=restored.sequence,
                anchor_sequence=None if anchor is None else anchor.sequence,
                groups_buffered=restored.counts["buffered_groups"],
                step=restored.step,
                steps_to_replay=restored.step - (0 if anchor is None else anchor.step),
            )
            self._redispatch(restored)

    def _redispatch(self, restored: Manifest) -> None:
        """Sealed siblings of the restored ledger are kept, the others get their next attempt."""
        for group in self.run.read(restored).state.ledger:
            self.record("redispatched", group_id=group.group_id)
            self._known.add(group.group_id)
            for sibling in group.siblings:
                rollout = rollout_id(group.group_id, sibling.generation_index)
                self._attempts[rollout] = sibling.attempt + 1
                if sibling.sealed is not None:
                    self._known |= {f"dispatched {rollout}", f"sealed {rollout}"}

    def record(self, event: str, **fields: Any) -> None:
        self.clock += 1
        line = {"t": self.clock, "run_process": f"life-{self._lives}", "event": event, **fields}
        self._lines.append(json.dumps(line) + "\n")
        self.store.write(self.run.layout.trace(f"life-{self._lives}"), "".join(self._lines).encode())

    def reserve(self, prompt: int) -> None:
        if self._is_new(f"e0-p{prompt}"):
            self.record("group_reserved", group_id=f"e0-p{prompt}")
            self.record("group_admitted", group_id=f"e0-p{prompt}")

    def dispatch(self, prompt: int, *indices: int) -> None:
        self.reserve(prompt)
        for rollout in (f"e0-p{prompt}_g{index}" for index in indices):
            if self._is_new(f"dispatched {rollout}"):
                self.record("attempt_dispatched", rollout_id=rollout, attempt=self._attempts.get(rollout, 0))

    def seal(self, prompt: int, *indices: int) -> None:
        for rollout in (f"e0-p{prompt}_g{index}" for index in indices):
            if self._is_new(f"sealed {rollout}"):
                attempt = self._attempts.get(rollout, 0)
                self.record("attempt_sealed", rollout_id=rollout, attempt=attempt, num_tokens=2)

    def _is_new(self, fact: str) -> bool:
        """Whether this process has not recorded it yet."""
        is_new = fact not in self._known
        self._known.add(fact)
        return is_new

    def publish(self, *prompts: int, versions: Sequence[tuple[int, int]] = ((0, 4),)) -> None:
        for prompt in prompts:
            self.dispatch(prompt, 0, 1)
            self.seal(prompt, 0, 1)
            self.record(
                "group_published",
                group_id=f"e0-p{prompt}",
                prompt_id=prompt,
                epoch=0,
                version_tokens=[list(pair) for pair in versions],
                num_tokens=sum(count for _, count in versions),
                rewards=[0.1, 1.1],
            )

    def train(self, step: int, *prompts: int, **more: Any) -> None:
        self.record("train_step", step=step, version=step, group_ids=[f"e0-p{p}" for p in prompts], **more)

    def recorded(self, steps: dict[int, Sequence[int]]) -> dict[str, Any]:
        """State and rows of trained groups, by the steps that trained them."""
        made = [(s, n, *self.run.make.buffered(p)) for s, prompts in steps.items() for n, p in enumerate(prompts)]
        rows = {row_id: row for *_, own in made for row_id, row in own.items()}
        return {"trained": tuple(TrainedGroup(s, n, group) for s, n, group, _ in made), "more_rows": rows}

    def snapshot(
        self,
        *,
        taken: int,
        buffered: tuple[int, ...] = (),
        ledger: tuple[int, ...] = (),
        anchor: Any = None,
        **state: Any,
    ) -> Manifest:
        return self._save(taken, buffered, ledger, anchor, 0 if anchor is None else anchor.step, **state)

    def checkpoint(self, step: int, *, taken: int, buffered: tuple[int, ...] = ()) -> Manifest:
        return self._save(taken, buffered, (), None, step, kind="trainer_checkpoint")

    def _save(
        self,
        taken: int,
        buffered: Any,
        ledger: Any,
        anchor: Any,
        step: int,
        kind: str = "rollout_snapshot",
        more_rows: Any = (),
        **state: Any,
    ) -> Manifest:
        step = max((t.step for t in state.get("trained", ())), default=step)
        progress = Progress(train_steps=step, source=SourcePosition(taken // PROMPTS, taken % PROMPTS))
        whole, rows = self.run.make.state(buffered=buffered, ledger=ledger, progress=progress, **state)
        bundle = self.run.bundle(whole, {**rows, **dict(more_rows)}, anchor=anchor, kind=kind, cut_time=self.clock)
        if kind == "trainer_checkpoint":
            bundle = replace(bundle, anchor=None)
        self.clock += 1
        manifest: Manifest = self.run.writer.write(bundle)
        return manifest

    def account(self) -> Audit:
        return account(self.store, self.run.layout, order=lambda epoch: range(PROMPTS))


@pytest.fixture
def simulation(memory_store: Store, open_run: Callable[..., Any]) -> Simulation:
    return Simulation(memory_store, open_run)


def _stopped_and_resumed(simulation: Simulation, *, set_back: float = 0.0) -> None:
    """Step 1, a checkpoint, a snapshot, step 2 that is lost with its process, and step 2 again, on a machine whose
    clock is `set_back` seconds behind.
    """
    simulation.publish(0, 1, 2)
    simulation.train(1, 0, 1)
    first = simulation.checkpoint(1, taken=3, buffered=(2,))
    simulation.dispatch(3, 0, 1)
    simulation.seal(3, 0)
    snapshot = simulation.snapshot(taken=4, buffered=(2,), ledger=(3,), anchor=first)
    simulation.publish(3, 4)
    simulation.train(2, 2, 3)
    simulation.clock -= set_back
    simulation.start(snapshot, anchor=first)
    simulation.publish(3)
    simulation.train(2, 2, 3)


def test_a_run_that_was_stopped_and_resumed_trained_every_prompt_once(simulation: Simulation) -> None:
    _stopped_and_resumed(simulation)
    simulation.publish(4)
    simulation.checkpoint(2, taken=5, buffered=(4,))
    audit = simulation.account()
    assert audit.problems == []
    assert audit.owners == {"trained": 4, "replay_buffer": 1, "ledger": 0, "spare_prompts": 0, "dropped": 0}
    assert (audit.frontier, audit.pairs_trained, audit.steps_rolled_back) == (5, 8, 1)


def _stopped_beyond_its_checkpoint(simulation: Simulation) -> Manifest:
    """Step 1 is durable; steps 2 and 3 are recorded in a snapshot, step 4 is lost with its process."""
    simulation.publish(*range(10))
    simulation.train(1, 0, 1)
    anchor = simulation.checkpoint(1, taken=2)
    simulation.train(2, 2, 3)
    simulation.train(3, 4, 5)
    trained = simulation.recorded({2: (2, 3), 3: (4, 5)})
    snapshot = simulation.snapshot(taken=8, buffered=(6, 7), anchor=anchor, **trained)
    simulation.train(4, 6, 7)
    simulation.start(snapshot, anchor=anchor)
    return snapshot


def test_a_resume_on_a_machine_whose_clock_is_behind_is_accounted_for_all_the_same(simulation: Simulation) -> None:
    _stopped_and_resumed(simulation, set_back=1000)
    audit = simulation.account()
    assert (audit.problems, audit.steps_rolled_back) == ([], 1)
    (cost,) = stop_cost(simulation.store, simulation.run.layout)
    assert (cost.run_process, cost.step, cost.down_s) == ("life-2", 1, 0.0)
    assert cost.lost_s > 0


def test_recorded_steps_are_trained_whether_or_not_they_were_trained_again_already(simulation: Simulation) -> None:
    _stopped_beyond_its_checkpoint(simulation)
    for step, prompts in ((None, ()), (2, (2, 3)), (3, (4, 5))):
        if step is not None:
            simulation.train(step, *prompts, replayed=True)
        audit = simulation.account()
        assert audit.problems == []
        assert audit.owners["trained"] == 6
    assert (audit.pairs_trained, audit.steps_rolled_back) == (3 * 4, 3)


def test_a_recorded_batch_that_was_replaced_is_found(simulation: Simulation) -> None:
    _stopped_beyond_its_checkpoint(simulation)
    simulation.train(2, 2, 4, replayed=True)
    assert simulation.account().replayed_otherwise == (2,)


def test_a_stop_beyond_the_checkpoint_costs_the_steps_that_were_not_recorded(simulation: Simulation) -> None:
    _stopped_beyond_its_checkpoint(simulation)
    simulation.train(2, 2, 3, replayed=True)
    (cost,) = stop_cost(simulation.store, simulation.run.layout)
    assert (cost.step, cost.steps_replayed, cost.steps_lost) == (3, 2, 1)


def test_every_owner_counts(simulation: Simulation) -> None:
    simulation.publish(0, 1, 2)
    simulation.train(1, 0, 1)
    make = simulation.run.make
    anchor = simulation.checkpoint(1, taken=2)
    simulation.dispatch(3, 0, 1)
    simulation.seal(3, 0)
    simulation.record("prompt_dropped", group_id="e0-p5", reason="gone")
    dropped = (DroppedPrompt(make.prompt(5), "gone", None),)
    simulation.snapshot(taken=6, buffered=(2,), ledger=(3,), anchor=anchor, spares=(make.prompt(4),), dropped=dropped)
    audit = simulation.account()
    assert audit.problems == []
    assert audit.owners == {"trained": 2, "replay_buffer": 1, "ledger": 1, "spare_prompts": 1, "dropped": 1}


def test_a_skipped_prompt_is_found(simulation: Simulation) -> None:
    simulation.publish(0, 2, 3)
    simulation.train(1, 0, 2)
    simulation.checkpoint(1, taken=4, buffered=(3,))
    audit = simulation.account()
    assert audit.skipped == ("e0-p1",)
    assert audit.problems == ["1 prompts skipped: e0-p1"]


def test_a_cursor_that_ran_ahead_of_what_was_saved_is_found(simulation: Simulation) -> None:
    simulation.publish(0, 1)
    simulation.train(1, 0, 1)
    simulation.checkpoint(1, taken=PROMPTS)
    assert simulation.account().skipped == tuple(f"e0-p{prompt}" for prompt in range(2, PROMPTS))


def test_a_group_that_two_steps_trained_is_found_with_each_generation(simulation: Simulation) -> None:
    simulation.publish(0, 1, 2)
    simulation.train(1, 0, 1)
    simulation.train(2, 1, 2)
    simulation.checkpoint(2, taken=3)
    audit = simulation.account()
    assert audit.trained_twice == ("e0-p1_g0", "e0-p1_g1")
    assert audit.owned_twice == ("e0-p1",)


def test_a_step_that_one_process_trained_twice_is_found(simulation: Simulation) -> None:
    simulation.publish(0, 1)
    simulation.train(1, 0, 1)
    simulation.train(1, 0, 1)
    simulation.checkpoint(1, taken=2)
    assert len(simulation.account().trained_twice) == 4


def test_a_trained_group_that_is_still_in_the_buffer_is_found(simulation: Simulation) -> None:
    simulation.publish(0, 1)
    simulation.train(1, 0, 1)
    simulation.checkpoint(1, taken=2, buffered=(1,))
    assert simulation.account().owned_twice == ("e0-p1",)


def test_a_prompt_that_the_source_has_not_handed_out_is_found(simulation: Simulation) -> None:
    simulation.publish(0, 1)
    simulation.train(1, 0, 1)
    simulation.checkpoint(1, taken=1)
    assert simulation.account().beyond_frontier == ("e0-p1",)


def test_a_step_without_a_trace_is_found(simulation: Simulation) -> None:
    simulation.publish(0, 1)
    simulation.checkpoint(1, taken=2)
    assert simulation.account().missing_steps == (1,)


def test_a_run_without_any_bundle_has_no_frontier(simulation: Simulation) -> None:
    simulation.publish(0)
    audit = simulation.account()
    assert (audit.sequence, audit.frontier, audit.problems) == (None, 0, [])


def test_steps_that_a_fresh_start_undid_do_not_count(simulation: Simulation) -> None:
    simulation.publish(0, 1)
    simulation.train(1, 0, 1)
    simulation.start()
    simulation.publish(0, 1)
    simulation.train(1, 0, 1)
    simulation.checkpoint(1, taken=2)
    audit = simulation.account()
    assert audit.problems == []
    assert (audit.pairs_trained, audit.steps_rolled_back) == (4, 1)


def test_a_step_recorded_a_moment_after_the_cut_that_contains_it_counts(simulation: Simulation) -> None:
    simulation.publish(0, 1)
    first = simulation.checkpoint(1, taken=2)
    simulation.train(1, 0, 1)
    simulation.start(first, anchor=first)
    simulation.publish(2, 3)
    simulation.train(2, 2, 3)
    simulation.checkpoint(2, taken=4)
    assert simulation.account().problems == []


def test_what_a_stop_cost_equals_sums_made_by_hand(simulation: Simulation) -> None:
    _stopped_and_resumed(simulation)
    (cost,) = stop_cost(simulation.store, simulation.run.layout)
    events = read_events(simulation.store, simulation.run.layout)
    before = [event for event in events if event["run_process"] == "life-1"]
    after = [event for event in events if event["run_process"] == "life-2"]
    cut_time = simulation.run.log.read()[2].cut_time
    running = next(e["t"] for e in before if e.get("rollout_id") == "e0-p3_g1")
    late = [e["num_tokens"] for e in before if e["event"] == "attempt_sealed" and e["t"] > cut_time]
    assert (cost.sequence, cost.step, cost.steps_lost) == (2, 1, 1)
    assert (cost.stopped_at, cost.down_s) == (before[-1]["t"], after[0]["t"] - before[-1]["t"])
    assert cost.lost_s == before[-1]["t"] - cut_time
    assert cost.thrown_away_s == cut_time - running
    assert (cost.groups_reused, cost.groups_unfinished) == (1, 1)
    assert (cost.siblings_reused, cost.siblings_rerun) == (1, 1)
    assert cost.tokens_kept == 4 + 2
    assert cost.tokens_lost == sum(late) == 2 + 2 * 2
    first = next(event["t"] for event in after if event["event"] == "attempt_dispatched")
    assert cost.to_first_dispatch_s == first - after[0]["t"]


def test_a_second_stop_does_not_count_what_the_first_one_lost(simulation: Simulation) -> None:
    _stopped_and_resumed(simulation)
    target = simulation.run.log.read()[2]
    simulation.start(target, anchor=simulation.run.log.read()[1])
    first, second = stop_cost(simulation.store, simulation.run.layout)
    assert second.sequence == first.sequence == target.sequence
    assert (first.tokens_lost, second.tokens_lost) == (6, 2)


def test_a_process_that_died_while_it_restored_undid_nothing(simulation: Simulation) -> None:
    _stopped_and_resumed(simulation)
    simulation.checkpoint(2, taken=4)
    before = simulation.account(), stop_cost(simulation.store, simulation.run.layout)
    simulation.start()
    simulation.record("attempt_abandoned", rollout_id="e0-p3_g0", attempt=0, reason="restart")
    assert (simulation.account(), stop_cost(simulation.store, simulation.run.layout)) == before


def test_costs_are_known_after_the_restored_bundle_was_retired(simulation: Simulation) -> None:
    _stopped_and_resumed(simulation)
    before = stop_cost(simulation.store, simulation.run.layout)
    for path in simulation.store.list(simulation.run.layout.parts) + simulation.store.list(
        simulation.run.layout.states
    ):
        simulation.store.delete(path)
    assert stop_cost(simulation.store, simulation.run.layout) == before


def test_a_run_that_never_stopped_has_no_costs(simulation: Simulation) -> None:
    simulation.publish(0)
    assert stop_cost(simulation.store, simulation.run.layout) == []
