"""What each built-in sampler admits, selects and gives up."""

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.samplers.build import build_sampler
from gpu_workers.controller.samplers.in_order import InOrderSampler
from gpu_workers.controller.samplers.ready_first import ReadyFirstSampler
from gpu_workers.controller.samplers.weight_fifo import WeightFifoSampler
from gpu_workers.controller.samplers.windowed import WindowedSampler

LIVE = Mutation("test")


def _orders(groups):
    return [group.order for group in groups]


def test_in_order_gives_out_a_stamp_once_and_only_within_the_lookahead():
    sampler = InOrderSampler(max_lookahead_versions=1)
    stamps = []
    for version in range(4):
        while sampler.may_admit(version):
            stamps.append(sampler.admit(LIVE))
        assert sampler.cursor == version + 1
    assert stamps == [0, 1, 2, 3, 4]


def test_in_order_runs_further_ahead_while_the_critic_warms_up_and_has_the_room_for_it(configure):
    config = configure(
        algorithm={"kind": "ppo", "policy_training_start_step": 3, "max_steps": 9},
        async_rl={"warmup_lookahead_versions": 3},
    )
    sampler = build_sampler(config)
    cursors = []
    for version in range(6):
        while sampler.may_admit(version):
            sampler.admit(LIVE)
        cursors.append(sampler.cursor)
    assert cursors == [3, 4, 4, 4, 5, 6], "nothing dispatched before version 3 is meant for a step after 4"
    assert sampler.required_capacity(4) == config.buffer_capacity == 16


def test_in_order_selects_the_groups_stamped_with_the_version_in_dispatch_order(finished):
    sampler = InOrderSampler(max_lookahead_versions=1)
    ready = [finished(order, 0, step) for order, step in enumerate((2, 3, 2, None, 2))]
    assert _orders(sampler.select(ready, [], version=2, least=1, most=2)) == [0, 2]
    assert _orders(sampler.select(ready, [], version=3, least=1, most=4)) == [1]
    assert sampler.select(ready, [], version=2, least=4, most=4) == []


def test_in_order_evicts_what_missed_its_step_however_fresh_it_is(finished):
    sampler = InOrderSampler(max_lookahead_versions=1)
    ready = [finished(order, 2, step) for order, step in enumerate((1, 2, 3, None))]
    assert _orders(sampler.evict(ready, version=2)) == [0, 3]


def test_weight_fifo_trains_the_oldest_version_first_and_waits_for_all_of_it(finished, running):
    sampler = WeightFifoSampler(max_staleness_versions=2)
    ready = [finished(order, version) for order, version in enumerate((1, 0, 1, 1, 0))]
    straggler = [running(9, 0)]
    assert _orders(sampler.select(ready, straggler, version=2, least=2, most=4)) == [1, 4]
    assert sampler.select(ready, straggler, version=2, least=3, most=4) == []
    assert _orders(sampler.select(ready, [], version=2, least=4, most=4)) == [1, 4, 0, 2]


def test_weight_fifo_does_not_wait_for_what_left_the_window_nor_select_it(finished, running):
    sampler = WeightFifoSampler(max_staleness_versions=1)
    ready = [finished(0, 0), finished(1, 1), finished(2, 2)]
    assert _orders(sampler.select(ready, [running(9, 0)], version=2, least=2, most=4)) == [1, 2]
    assert _orders(sampler.evict(ready, version=2)) == [0]


def test_ready_first_trains_any_ready_group_and_keeps_stragglers(finished, running):
    sampler = ReadyFirstSampler(max_staleness_versions=0)
    ready = [finished(0, 7), finished(3, 0), finished(5, 9)]
    assert _orders(sampler.select(ready, [running(1, 0)], version=9, least=2, most=2)) == [0, 3]
    assert sampler.evict(ready, version=9) == []


def test_ready_first_and_weight_fifo_run_ahead_by_their_staleness_without_stamps():
    for sampler in (ReadyFirstSampler(max_staleness_versions=2), WeightFifoSampler(max_staleness_versions=2)):
        assert [sampler.admit(LIVE) for _ in range(3) if sampler.may_admit(0)] == [None] * 3
        assert (sampler.may_admit(0), sampler.may_admit(1)) == (False, True)


def test_windowed_never_waits_and_gives_up_finished_and_unfinished_groups_outside_the_window(finished, running):
    sampler = WindowedSampler(max_staleness_versions=1, freshest_first=False)
    assert [sampler.admit(LIVE) for _ in range(9) if sampler.may_admit(0)] == [None] * 9
    ready = [finished(order, version) for order, version in enumerate((3, 1, 2, 3))]
    assert _orders(sampler.evict(ready, version=3)) == [1]
    assert _orders(sampler.select(ready, [], version=3, least=1, most=2)) == [0, 2]
    assert [sampler.should_abort_inflight(running(0, v), version=3) for v in (1, 2, 3)] == [True, False, False]


def test_windowed_can_take_the_freshest_first_and_dispatch_order_among_equals(finished):
    sampler = WindowedSampler(max_staleness_versions=2, freshest_first=True)
    ready = [finished(order, version) for order, version in enumerate((1, 3, 2, 3))]
    assert _orders(sampler.select(ready, [], version=3, least=4, most=4)) == [1, 3, 2, 0]
