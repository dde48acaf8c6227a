"""A trainer rank that died takes the state with it: the run is over at once, and a resume brings it back."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from gpu_workers.ray_ports import RayTrainer
from storage.errors import InfrastructureFailure, TrainerLost
from tasks.retries import is_mended_by_resume, is_retryable


class Rank:
    """A trainer actor's handle whose calls end with an error."""

    def __init__(self, error):
        self._error = error

    def __getattr__(self, verb):
        return self

    def remote(self, *arguments):
        ended = asyncio.get_running_loop().create_future()
        ended.set_exception(self._error)
        return ended


@pytest.mark.parametrize(
    "verb", ["begin_step", "finish_step", "publish_weights", "begin_save", "finish_save", "restore"]
)
async def test_any_call_of_a_dead_rank_ends_the_run_before_it_raises(verb):
    told = []
    trainer = RayTrainer([Rank(ActorDiedError())], on_lost=told.append)
    with pytest.raises(TrainerLost, match=r"failed: .*died.* Resume the run") as raised:
        await getattr(trainer, verb)("x")
    assert told == [raised.value]
    assert is_mended_by_resume(raised.value)
    assert not is_retryable(raised.value)


async def test_a_rank_that_can_not_be_reached_may_live():
    told = []
    trainer = RayTrainer([Rank(ActorUnavailableError("the node does not answer", None))], on_lost=told.append)
    with pytest.raises(InfrastructureFailure):
        await trainer.begin_step(1)
    assert told == []


async def test_a_trainer_that_dies_in_the_commit_window_leaves_a_run_that_is_resumed(make_world):
    world = make_world(algorithm={"max_steps": 4})
    controller = await world.start()
    await world.train(1, 1)
    saved = (await world.snapshot(1)).manifest
    finish = world.trainer.finish_step

    async def die(step):
        await finish(step)
        raise TrainerLost("finish_step of the trainer failed: it died")

    world.trainer.finish_step = die
    with pytest.raises(TrainerLost):
        await controller.train_steps(2, 2)
    assert controller.state == "failed"
    await world.kill()
    assert world.plan().target == saved.sequence
    await world.start()
    await world.train(2, 4)
    assert world.audit().problems == []
    await world.kill()
