"""SIGTERM cancels a flow even where the exception that Prefect's handler raises is lost."""

import asyncio
import os
import signal

import pytest

from flows.termination import cancelled_by_sigterm


class Termination(BaseException):
    """What Prefect's handler raises."""


@pytest.fixture
def prefects_handler():
    def raise_termination(*_):
        raise Termination

    earlier = signal.signal(signal.SIGTERM, raise_termination)
    yield raise_termination
    signal.signal(signal.SIGTERM, earlier)


async def wait_for_ever():
    with cancelled_by_sigterm():
        await asyncio.Event().wait()


async def test_sigterm_inside_another_callback_cancels_the_task_and_leaves_the_handler(prefects_handler):
    lost = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: lost.append(context["exception"]))
    waiting = asyncio.create_task(wait_for_ever())
    await asyncio.sleep(0)
    loop.call_soon(os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [type(error) for error in lost] == [Termination]
    assert signal.getsignal(signal.SIGTERM) is prefects_handler


async def test_nothing_is_left_behind_after_the_block(prefects_handler):
    with cancelled_by_sigterm():
        pass
    assert signal.set_wakeup_fd(-1) == -1
