"""Ray's errors become ours at one place."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from storage.errors import ConfigurationError, DataFailure, InfrastructureFailure, StaleIncarnation
from tasks.ray_runtime import connect, translated_errors


def raise_translated(error: Exception) -> None:
    with translated_errors("run"):
        raise error


def test_an_error_of_the_controller_arrives_as_itself():
    original = DataFailure("prompt 7 has no letters")
    with pytest.raises(DataFailure) as caught:
        raise_translated(RayTaskError("train_steps", "a remote traceback", original).as_instanceof_cause())
    assert caught.value is original


def test_a_dead_controller_is_a_stale_incarnation_with_the_next_step():
    with pytest.raises(StaleIncarnation, match="start `train` again"):
        raise_translated(ActorDiedError())


def test_a_controller_out_of_reach_may_be_asked_again():
    with pytest.raises(InfrastructureFailure):
        raise_translated(ActorUnavailableError("no answer", None))


def test_a_bug_stays_a_bug():
    with pytest.raises(ZeroDivisionError):
        raise_translated(ZeroDivisionError())


def test_without_an_address_no_cluster_is_started(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigurationError, match="RAY_ADDRESS"):
        connect()


def test_an_address_where_nobody_listens_is_told_at_once(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InfrastructureFailure, match=r"127\.0\.0\.1:1"):
        connect()
