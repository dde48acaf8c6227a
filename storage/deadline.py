"""Runs a blocking call with a deadline: a store that hangs must not hang its caller."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class DeadlinePassed(Exception):
    """The call did not return in time; it may still take effect later."""


def call_within(deadline_s: float, action: Callable[[], T]) -> T:
    """The result of `action`, run in a thread of its own.

    A call that hangs costs one idle daemon thread: it neither uses up a pool nor keeps the process from
    exiting.

    Raises: DeadlinePassed, or what `action` raised.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=run, name="midflight-store-call", daemon=True).start()
    try:
        return outcome.result(timeout=deadline_s)
    except TimeoutError:
        if outcome.done():
            return outcome.result()
        raise DeadlinePassed(f"no answer within {deadline_s:g} s") from None
