"""Which failed task is tried again: only one whose error says that trying again can help."""

from collections.abc import Iterator
from typing import Any

from storage.errors import MidflightError

# Back-off of retried tasks: 1, 2, 4 ... seconds.
RETRIES = 3
RETRY_DELAYS_S = [1.0, 2.0, 4.0]


def first_cause(error: BaseException) -> BaseException:
    """The error behind an exception group: its first member that is not itself a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def domain_error(error: BaseException) -> MidflightError | None:
    """The MidflightError behind `error`, also when Ray wrapped it (`cause`) or it was raised `from` another."""
    return next((link for link in _chain(first_cause(error)) if isinstance(link, MidflightError)), None)


def is_retryable(error: BaseException) -> bool:
    """Whether doing the same numbered thing again can help. Unknown errors and broken invariants: no."""
    cause = domain_error(error)
    return cause is not None and cause.retryable


def is_mended_by_resume(error: BaseException) -> bool:
    """Whether a new start, on a new runtime or after a while, can go on where this one ended."""
    cause = domain_error(error)
    return cause is not None and cause.mended_by_resume


def retry_condition(_task: Any, _task_run: Any, state: Any) -> bool:
    """Prefect's `retry_condition_fn`."""
    error = state.data
    return isinstance(error, BaseException) and is_retryable(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    queue: list[BaseException] = [error]
    while queue:
        link = queue.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        wrapped = vars(link).get("cause")  # ray.exceptions.RayTaskError keeps the original here
        queue.extend(x for x in (wrapped, link.__cause__) if isinstance(x, BaseException))
