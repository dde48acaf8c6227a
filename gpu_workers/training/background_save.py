"""Writes one checkpoint at a time in a thread, beside the training."""

import threading
from collections.abc import Callable, Sequence

from storage.errors import BrokenInvariant
from storage.manifests import FileEntry

Work = Callable[[], Sequence[FileEntry]]


class BackgroundSave:
    """idle --start--> writing --> written | failed --start--> writing (of the next)

    The thread is a daemon: what a process that ends has not written was never published.
    """

    def __init__(self) -> None:
        self._prefix: str | None = None
        self._thread: threading.Thread | None = None
        self._entries: Sequence[FileEntry] | None = None
        self._failure: BaseException | None = None

    def start(self, prefix: str, work: Work) -> None:
        """Begin `work`, which writes below `prefix`. The result of the one before is forgotten."""
        self.wait()
        self._prefix, self._entries, self._failure = prefix, None, None
        self._thread = threading.Thread(target=self._run, args=(work,), name="midflight-save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def written(self, prefix: str) -> Sequence[FileEntry] | None:
        """What was written below `prefix`; None while it is being written.

        Raises what the work failed with; BrokenInvariant when another prefix was the last to be saved.
        """
        if prefix != self._prefix or self._thread is None:
            raise BrokenInvariant(f"the trainer was asked for the files below {prefix}, but saved below {self._prefix}")
        if self._thread.is_alive():
            return None
        if self._failure is not None:
            raise self._failure
        return self._entries

    def _run(self, work: Work) -> None:
        try:
            self._entries = work()
        except BaseException as error:  # noqa: BLE001 - raised where the files are asked for
            self._failure = error
