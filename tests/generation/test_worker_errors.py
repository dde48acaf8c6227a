"""What an error of a Ray worker means: its own error, a refused configuration, or a failure that may pass."""

import traceback

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from gpu_workers.ray_ports import translate
from storage.errors import ConfigurationError, DataFailure, InfrastructureFailure


def _in_constructor(error: Exception) -> ActorDiedError:
    """As Ray reports an error of an actor's constructor: as text."""
    try:
        raise error
    except type(error):
        return ActorDiedError(RayTaskError("GeneratorActor.__init__", traceback.format_exc(), error))


def test_an_error_of_the_worker_arrives_as_itself():
    translated = translate(RayTaskError("submit", "a traceback", DataFailure("too long")), "generator 0")
    assert (type(translated), str(translated)) == (DataFailure, "too long")


def test_a_configuration_that_a_worker_refuses_at_its_start_is_not_worth_another_try():
    translated = translate(_in_constructor(ConfigurationError("generation.top_p is 0.5; set it to 1.0")), "launch")
    assert (type(translated), str(translated)) == (ConfigurationError, "generation.top_p is 0.5; set it to 1.0")
    assert not translated.retryable


def test_another_error_at_the_start_may_pass_and_is_told_in_one_line():
    translated = translate(_in_constructor(MemoryError("no room for the model")), "start of generator 0")
    assert isinstance(translated, InfrastructureFailure)
    assert str(translated) == (
        "start of generator 0 failed: its actor could not start: MemoryError: no room for the model; "
        "the worker's log has the details"
    )


@pytest.mark.parametrize("error", [ActorDiedError(), RayTaskError("submit", "a traceback", ValueError("bug"))])
def test_a_dead_worker_and_an_unknown_error_are_infrastructure_failures(error):
    assert type(translate(error, "generator 0")) is InfrastructureFailure
