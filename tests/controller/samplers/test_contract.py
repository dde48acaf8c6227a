"""The contract of samplers: one suite, the same for the built-in ones and for somebody else's."""

import random
from dataclasses import dataclass, field

import pytest

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.samplers.build import build_sampler
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from storage.errors import BrokenInvariant, RestoreRefused

LIVE = Mutation("test")
STEP = 4


@dataclass
class Course:
    """A run of one sampler without workers: groups finish in any order, some are given up, steps are trained."""

    sampler: object
    finished: object
    running: object
    version: int = 0
    stamps: list = field(default_factory=list)
    ready: list = field(default_factory=list)
    unfinished: list = field(default_factory=list)
    gone: list = field(default_factory=list)
    order: int = 0

    def admit(self):
        stamp = self.sampler.admit(LIVE)
        self.stamps.append(stamp)
        for _ in range(STEP):
            self.unfinished.append(self.running(self.order, self.version, stamp))
            self.order += 1

    def finish(self, group, tokens):
        self.unfinished.remove(group)
        self.ready.append(self.finished(group.order, group.start_version, group.target_step, tokens))
        self.ready.sort(key=lambda g: g.order)

    def select(self, least=STEP, most=STEP):
        return self.sampler.select(self.ready, self.unfinished, version=self.version, least=least, most=most)

    def give_up(self):
        evicted = self.sampler.evict(self.ready, version=self.version)
        self.gone += evicted
        self.ready = [group for group in self.ready if group not in evicted]
        keep = [g for g in self.unfinished if not self.sampler.should_abort_inflight(g, version=self.version)]
        self.unfinished = keep

    def train(self):
        chosen = self.select()
        self.ready = [group for group in self.ready if group not in chosen]
        self.version += bool(chosen)
        return chosen

    def turn(self, rng):
        """Anything that may happen next."""
        if self.sampler.may_admit(self.version) and len(self.ready) + len(self.unfinished) < 6 * STEP:
            self.admit()
        for group in rng.sample(self.unfinished, k=min(len(self.unfinished), rng.randrange(4))):
            self.finish(group, tokens=rng.randrange(1, 9))
        self.give_up()


@pytest.fixture
def course(configure, options, sampler_name, finished, running):
    def begin(lag):
        windowed = {"buffer_capacity": 6 * STEP} if sampler_name in ("windowed", "freshest") else {}
        config = configure(async_rl=options(sampler_name, lag, **windowed))
        return Course(build_sampler(config), finished, running)

    return begin


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_selection_is_least_to_most_ready_groups_or_none(course, lag):
    run, rng = course(lag), random.Random(lag)
    for _ in range(60):
        run.turn(rng)
        least = rng.randint(1, STEP)
        chosen = run.select(least=least)
        assert all(group in run.ready for group in chosen)
        assert len({group.group_id for group in chosen}) == len(chosen)
        assert not chosen or least <= len(chosen) <= STEP
        assert chosen == run.select(least=least), "asking again changes nothing"
        run.train()
    assert run.version > 5


def _take_in_chunks(run, rng, chunk):
    """A streamed step: what is taken is not offered again, and other groups finish between two chunks."""
    taken = []
    while left := STEP - len(taken):
        chosen = run.select(least=min(chunk, left), most=left)
        assert len(chosen) in (0, *range(min(chunk, left), left + 1))
        taken += chosen
        run.ready = [group for group in run.ready if group not in chosen]
        if not chosen:
            run.turn(rng)
    return taken


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_step_that_is_taken_in_chunks_keeps_the_samplers_rule_from_its_first_group_to_its_last(
    course, lag, chunk, sampler_name
):
    run, rng = course(lag), random.Random(60 + lag)
    for version in range(12):
        step = _take_in_chunks(run, rng, chunk)
        assert len({group.group_id for group in step}) == STEP
        starts = [group.start_version for group in step]
        if step[0].target_step is not None:
            assert {group.target_step for group in step} == {version}
        if sampler_name == "weight_fifo":
            assert starts == sorted(starts), "no newer version before an older one, across chunks too"
        if sampler_name in ("weight_fifo", "windowed"):
            assert min(starts) >= version - lag
        run.version += 1


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_what_is_evicted_could_not_be_selected_any_more_and_what_is_not_still_can(course, lag):
    run, rng = course(lag), random.Random(10 + lag)
    for _ in range(60):
        run.turn(rng)
        run.train()
        for version in range(run.version, run.version + 4):
            for group in run.gone[-3 * STEP :]:
                assert run.sampler.select([group], [], version=version, least=1, most=1) == []
        for group in run.ready:
            if group not in run.sampler.evict(run.ready, version=run.version):
                later = range(run.version, run.version + lag + 2)
                assert any(run.sampler.select([group], [], version=v, least=1, most=1) for v in later)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_group_is_aborted_exactly_when_it_would_be_evicted_if_it_were_finished(course, lag, sampler_name):
    run, rng = course(lag), random.Random(20 + lag)
    aborted = 0
    for _ in range(60):
        run.turn(rng)
        run.train()
        for group in run.unfinished:
            if run.sampler.should_abort_inflight(group, version=run.version):
                aborted += 1
                finished = run.finished(group.order, group.start_version, group.target_step)
                assert run.sampler.evict([finished], version=run.version) == [finished]
    assert (aborted > 0) == (sampler_name in ("windowed", "freshest"))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_scenario_14_stamps_rise_by_one_are_covered_by_the_cursor_and_never_lie_in_the_past(course, lag):
    run, rng = course(lag), random.Random(30 + lag)
    for _ in range(60):
        before = len(run.stamps)
        run.turn(rng)
        for stamp in run.stamps[before:]:
            assert stamp is None or stamp >= run.version
        run.train()
        assert run.sampler.cursor == len(run.stamps) - 1
    assert run.stamps == list(range(len(run.stamps))) or set(run.stamps) == {None}


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_gated_sampler_stays_within_the_capacity_it_asks_for(course, lag):
    run, rng = course(lag), random.Random(40 + lag)
    needed = run.sampler.required_capacity(STEP)
    for _ in range(60):
        run.turn(rng)
        assert needed is None or len(run.ready) + len(run.unfinished) <= needed == STEP * (lag + 1)
        run.train()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_saved_cursor_is_restored_exactly_and_goes_on_the_same(course, lag):
    run, rng = course(lag), random.Random(50 + lag)
    for _ in range(20):
        run.turn(rng)
        run.train()
    groups = (*run.ready, *run.unfinished)
    saved = SavedDispatch(
        sampler=run.sampler.name,
        cursor=run.sampler.cursor,
        trainer_version=run.version,
        stamps=run.stamps[0] is not None,
        target_steps=tuple(group.target_step for group in groups),
    )
    again = course(lag)
    again.sampler.require_restorable(saved)
    assert again.sampler.cursor == -1
    again.sampler.restore(saved)
    assert again.sampler.cursor == run.sampler.cursor
    for version in range(run.version, run.version + 4):
        assert again.sampler.may_admit(version) == run.sampler.may_admit(version)
    again.sampler.restore(SavedDispatch(sampler=run.sampler.name))
    assert again.sampler.cursor == -1


def test_a_cursor_that_does_not_cover_a_stamp_and_a_strangers_dispatch_are_refused(course):
    run = course(1)
    name = run.sampler.name
    uncovered = SavedDispatch(sampler=name, cursor=4, trainer_version=3, stamps=True, target_steps=(3, 5))
    strange = SavedDispatch(sampler="team_samplers:Other", cursor=4, trainer_version=3, target_steps=(3, 3))
    for saved in (uncovered, strange):
        for verb in (run.sampler.require_restorable, run.sampler.restore):
            with pytest.raises(RestoreRefused) as refused:
                verb(saved)
            assert name in str(refused.value) or "does not cover target step 5" in str(refused.value)
        assert run.sampler.cursor == -1


def test_a_batch_is_admitted_only_in_a_live_mutation(course):
    run, dead = course(1), Mutation("over")
    dead.expire()
    with pytest.raises(BrokenInvariant, match="after its barrier section ended"):
        run.sampler.admit(dead)
    assert run.sampler.cursor == -1


def test_a_sampler_declares_what_it_can(course):
    sampler = course(1).sampler
    assert (sampler.restores_buffers, sampler.claims) == (True, True)
