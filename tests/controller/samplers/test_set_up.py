"""Setting a sampler up: what can't work is refused before anything starts, with the key and the value needed."""

import pytest
from pydantic import ValidationError

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.samplers.build import build_sampler, capacity_of
from storage.errors import BrokenInvariant, ConfigurationError

LIVE = Mutation("test")


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_default_capacity_is_what_the_sampler_needs(configure, options, sampler_name, lag):
    config = configure(async_rl=options(sampler_name, lag))
    sampler = build_sampler(config)
    expected = None if sampler_name in ("windowed", "freshest") else 4 * (lag + 1)
    assert capacity_of(config, sampler) == sampler.required_capacity(4) == expected
    assert config.buffer_capacity == (None if ":" in sampler_name else expected)
    assert capacity_of(configure(async_rl=options(sampler_name, lag, buffer_capacity=50)), sampler) == 50


def test_too_little_capacity_is_refused_with_the_value_needed(configure, options, sampler_name):
    needed = 4 if sampler_name in ("windowed", "freshest") else 12
    build_sampler(configure(async_rl=options(sampler_name, 2, buffer_capacity=needed)))
    message = rf"buffer_capacity is {needed - 1}, but sampler .* needs {needed}"
    with pytest.raises((ValidationError, ConfigurationError), match=message):
        build_sampler(configure(async_rl=options(sampler_name, 2, buffer_capacity=needed - 1)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampler": "fifo"}, "in_order"),
        ({"sampler": "custom"}, "custom_sampler is None; a sampler of your own needs both"),
        ({"custom_sampler": "a.b:C"}, "async_rl.sampler is in_order and async_rl.custom_sampler is 'a.b:C'"),
        ({"sampler": "custom", "custom_sampler": "a.b.C"}, "is 'a.b.C'; expected package.module:Class"),
        ({"freshest_first": True}, "freshest_first is True, but sampler in_order does not use it .windowed would"),
        ({"max_staleness_versions": 3}, "max_staleness_versions is 3, .* and set async_rl.max_lookahead_versions"),
        ({"sampler": "windowed", "max_lookahead_versions": 3}, "is 3, .* set async_rl.max_staleness_versions instead"),
        ({"sampler": "ready_first", "warmup_lookahead_versions": 3}, "warmup_lookahead_versions is 3, but sampler rea"),
        ({"sampler": "ready_first", "max_staleness_versions": -1}, "greater than or equal to 0"),
    ],
)
def test_options_that_cannot_work_together_are_refused_by_name(configure, wrong, message):
    with pytest.raises(ValidationError, match=message):
        configure(async_rl=wrong)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.samplers:Any", "module 'no_such_package.samplers' can't be imported"),
        ("team_samplers:Missing", "has no class 'Missing'; it has .*ShortestFirst"),
        ("team_samplers:bounded", "has no class 'bounded'"),
        ("team_samplers:NeedsMore", r"can't be built as NeedsMore\(config\): TypeError"),
        ("team_samplers:Silent", r"lacks claims, may_admit\(\), admit\(\), select\(\), evict\(\)"),
        ("team_samplers:Vague", "declares claims 'sometimes'; expected True or False"),
        ("team_samplers:Unclaiming", "declares claims False: groups taken out before their step has committed"),
        ("team_samplers:Closed", r"may_admit\(0\) is False; expected True"),
        ("team_samplers:OldFashioned", r"select\(\) of nothing failed: TypeError"),
        ("team_samplers:Elsewhere", r"cursor after restore\(\) of 5 is 6; expected 5"),
        ("team_samplers:Roomless", r"required_capacity\(\) is 0; expected a positive number or None"),
    ],
)
def test_a_custom_sampler_that_is_missing_or_breaks_the_contract_is_refused_before_anything_starts(
    configure, path, message
):
    config = configure(async_rl={"sampler": "custom", "custom_sampler": path})
    with pytest.raises(ConfigurationError, match=f"async_rl.custom_sampler '{path}'.*{message}"):
        build_sampler(config)


def test_a_custom_sampler_has_the_capacity_it_asks_for_and_is_loaded_only_when_built(configure):
    chosen = {"sampler": "custom", "custom_sampler": "team_samplers:Spacious"}
    with pytest.raises(
        ConfigurationError, match="buffer_capacity is 99, but sampler 'team_samplers:Spacious' needs 100"
    ):
        build_sampler(configure(async_rl={**chosen, "buffer_capacity": 99}))
    assert capacity_of(configure(async_rl=chosen), build_sampler(configure(async_rl=chosen))) == 100
    configure(async_rl={"sampler": "custom", "custom_sampler": "not_installed_here:Any"})


def test_answers_of_a_custom_sampler_that_break_the_contract_end_the_run(configure, finished, running):
    def custom(name):
        return build_sampler(configure(async_rl={"sampler": "custom", "custom_sampler": f"team_samplers:{name}"}))

    ready = [finished(order) for order in range(4)]
    bounds = {"version": 0, "least": 2, "most": 4}
    with pytest.raises(BrokenInvariant, match="'team_samplers:Impatient' selected 1 groups, asked for 2 to 4 or none"):
        custom("Impatient").select(ready, [], **bounds)
    with pytest.raises(BrokenInvariant, match="selected e0-p7, which it was not offered"):
        custom("Greedy").select(ready, [running(7)], **bounds)
    with pytest.raises(BrokenInvariant, match="evicted a group twice"):
        custom("Greedy").evict(ready, version=0)
    repetitive = custom("Repetitive")
    repetitive.admit(LIVE)
    with pytest.raises(BrokenInvariant, match="admitted target step 0 after 0 with its cursor at 1"):
        repetitive.admit(LIVE)


async def test_a_sampler_that_stamps_some_batches_and_others_not_ends_the_run(make_world, options):
    world = make_world(async_rl=options("team_samplers:Moody"))
    world.boot()
    await world.controller.restore(world.plan())
    await world.settle(lambda: world.controller.state == "failed")
    with pytest.raises(BrokenInvariant, match="sampler 'team_samplers:Moody' stamps some batches and others not"):
        await world.controller.train_steps(1, 1)
    await world.kill()
