"""Which errors are worth another try."""

import pytest
from prefect.states import Completed, Failed
from ray.exceptions import RayTaskError

from storage.errors import BrokenInvariant, StaleIncarnation, StoreUnavailable
from tasks.retries import domain_error, first_cause, is_retryable, retry_condition


def raised_by_ray(error: Exception) -> Exception:
    return RayTaskError("verb", "a remote traceback", error).as_instanceof_cause()


def raised_from(error: Exception) -> Exception:
    outer = RuntimeError("outer")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize("wrapped", [lambda e: e, raised_by_ray, raised_from, lambda e: ExceptionGroup("loops", [e])])
def test_a_retryable_error_is_retried_however_it_was_wrapped(wrapped):
    assert is_retryable(wrapped(StoreUnavailable("no answer")))


@pytest.mark.parametrize("wrapped", [lambda e: e, raised_by_ray, raised_from])
@pytest.mark.parametrize("error", [BrokenInvariant("lost a row"), StaleIncarnation("gone")])
def test_other_errors_of_ours_are_not_retried(wrapped, error):
    assert not is_retryable(wrapped(error))


def test_an_unknown_error_is_not_retried():
    assert not is_retryable(ValueError("a bug"))


def test_the_first_cause_of_nested_groups_is_found():
    cause = StoreUnavailable("no answer")
    assert first_cause(ExceptionGroup("outer", [ExceptionGroup("inner", [cause]), ValueError()])) is cause


def test_an_error_that_is_its_own_cause_ends_the_search():
    error = ValueError("odd")
    error.__cause__ = raised_from(error)
    assert domain_error(error) is None


def test_prefect_asks_with_the_state_of_the_failed_task():
    assert retry_condition(None, None, Failed(data=StoreUnavailable("no answer")))
    assert not retry_condition(None, None, Failed(data=BrokenInvariant("lost a row")))
    assert not retry_condition(None, None, Completed())
