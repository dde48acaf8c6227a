"""SIGTERM reaches a flow for certain.

Prefect's handler raises an exception wherever the main thread happens to be. Inside a callback or another task of the
event loop that exception ends there, and the flow never hears of it.
"""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """SIGTERM cancels the current task while the block runs, besides what the installed handler does.

    The handler stays installed: Prefect tells a cancel from a termination by it. Nothing happens outside the main
    thread, where no signal is handled.
    """
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    received, notified = socket.socketpair()
    received.setblocking(False)
    notified.setblocking(False)
    earlier = signal.set_wakeup_fd(notified.fileno(), warn_on_full_buffer=False)

    def hear() -> None:
        numbers = received.recv(4096)
        if signal.SIGTERM in numbers:
            task.cancel()
        if earlier != -1:
            os.write(earlier, numbers)

    loop.add_reader(received, hear)
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        loop.remove_reader(received)
        received.close()
        notified.close()
