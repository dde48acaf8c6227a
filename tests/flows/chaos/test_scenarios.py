"""A scenario is a function of its kind and seed; in turn they meet every kind and every point."""

import pytest

from flows.chaos.play import TINY
from flows.chaos.scenario import ROTA, STEPS, Kind, Role, scenario, scenarios
from flows.config_files import load_config
from storage.fault_plan import Action
from storage.fault_points import POINTS

SEEDS = range(60)


def test_a_kind_and_a_seed_always_give_the_same_scenario():
    assert [scenario(kind, 7) for kind in Kind] == [scenario(kind, 7) for kind in Kind]
    assert len({scenario(Kind.DOUBLE_CRASH, seed).described for seed in SEEDS}) > 30


def test_a_line_of_the_table_is_played_again_by_its_kind_and_seed_alone():
    for found in scenarios(40, 20):
        assert scenarios(found.seed, 1, [found.kind]) == [found]


def test_twenty_in_a_row_meet_every_kind_from_any_seed():
    for first in (0, 3, 117):
        assert {found.kind for found in scenarios(first, len(ROTA))} == set(Kind)


def test_two_hundred_in_a_row_kill_at_every_point():
    for first in (0, 1000):
        kills = [found for found in scenarios(first, 200) if found.kind is Kind.KILL_AT_POINT]
        assert {found.faults[-1].point for found in kills} == set(POINTS)


def test_the_given_kinds_take_turns():
    found = scenarios(0, 4, [Kind.KILL_FLOW, Kind.TORN_FILE])
    assert [one.kind for one in found] == [Kind.KILL_FLOW, Kind.TORN_FILE] * 2


@pytest.mark.parametrize("kind", Kind)
def test_every_scenario_is_a_valid_run_that_something_happens_to(kind):
    for seed in SEEDS:
        found = scenario(kind, seed)
        sets = [f"{key}={value}" for key, value in {**found.settings, "name": found.run}.items()]
        config = load_config(TINY, sets)
        assert config.algorithm.max_steps == STEPS
        assert found.kill or found.faults
        assert found.described
        assert all(fault.visit >= 1 and fault.times >= 1 for fault in found.faults)


def test_kills_from_outside_meet_the_role_of_their_kind():
    for role in (*Role,):
        if role is not Role.EVERYTHING:
            found = scenario(Kind(f"kill-{role}"), 3)
            assert found.kill is not None
            assert found.kill.role is role
            assert found.served is (role is Role.ENVIRONMENT)


def test_what_only_a_restored_run_passes_is_killed_after_a_crash():
    at_points = [found for found in scenarios(0, 200) if found.kind is Kind.KILL_AT_POINT]
    for found in [*(scenario(Kind.CRASH_IN_RESTORE, seed) for seed in SEEDS), *at_points]:
        points = [fault.point for fault in found.faults if fault.action is Action.KILL]
        if points[-1].startswith("restore:") or points[-1] in ("part:read", "table:read", "model-file:read"):
            assert found.kill is not None or points[0] == "*-manifest:after-write"


def test_what_waits_for_a_file_to_be_read_comes_after_a_bundle_that_has_it():
    for seed in SEEDS:
        found = scenario(Kind.CRASH_IN_RESTORE, seed)
        if any(fault.point == "part:read" for fault in found.faults):
            noticed = [fault.point for fault in found.faults if fault.action is Action.SLOW]
            assert noticed == ["checkpoint-manifest:after-write", "part:after-write"]
            assert found.kill is None


def test_a_flipped_bit_is_followed_by_a_kill_that_makes_the_run_read_it():
    for seed in SEEDS:
        flip, kill = scenario(Kind.FLIPPED_BIT, seed).faults
        assert (flip.action, kill.action) == (Action.FLIP, Action.KILL)
