"""Who drives a run: the flow run whose calls are obeyed, for as long as it is heard.

    nobody --attach--> driven --detach, or lease_s of silence--> free for the next --attach-->
    driven --attach(take_over)--> driven by another
    any --end--> over: whoever calls is told why

A driver that was replaced is refused by name from then on, also with its calls that are being served.
"""

import asyncio
import time
from collections.abc import Callable

from storage.errors import MidflightError, RunAlreadyLive


class DriverLease:
    """The lease of one controller. `clock` is in seconds of any origin."""

    def __init__(
        self, run: str, incarnation: str, *, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._clock = clock
        self._driver: str | None = None
        self._newest: str | None = None  # also after it has left
        self._heard = clock()
        self._replaced = asyncio.Event()
        self._over: MidflightError | None = None

    @property
    def driver(self) -> str | None:
        """The driver while its lease runs; None when another may attach."""
        return self._driver if self.silence_s < self._lease_s else None

    @property
    def silence_s(self) -> float:
        """Seconds since a driver was heard."""
        return self._clock() - self._heard

    def attach(self, driver: str, *, take_over: bool = False) -> None:
        """Make `driver` the one that is obeyed. Raises RunAlreadyLive while another is, unless `take_over`."""
        if self.driver not in (None, driver) and not take_over:
            raise RunAlreadyLive(
                f"run '{self._run}' is driven by {self._driver} (incarnation {self._incarnation}); wait for it, cancel "
                "it, take the run over with --take-over, or choose another name"
            )
        if driver != self._newest:
            self._tell()
        self._driver = self._newest = driver
        self._heard = self._clock()

    def detach(self, driver: str) -> None:
        """`driver` has ended; one that has been replaced is not listened to."""
        if self._driver == driver:
            self._driver = None

    def hear(self, driver: str) -> None:
        """A call of `driver`: renews its lease. Raises RunAlreadyLive when it does not drive the run any more, and what
        the lease was ended with.
        """
        if self._over is not None or self._driver != driver:
            raise self._reason(driver)
        self._heard = self._clock()

    async def lost(self, driver: str) -> MidflightError:
        """Wait until `driver` does not drive the run any more; why."""
        if self._over is None and self._newest == driver:
            await self._replaced.wait()
        return self._reason(driver)

    def end(self, error: MidflightError) -> None:
        """The run can't be driven any more: calls in flight and later ones fail with `error`."""
        self._over = error
        self._tell()

    def _tell(self) -> None:
        self._replaced.set()
        self._replaced = asyncio.Event()

    def _reason(self, driver: str) -> MidflightError:
        if self._over is not None:
            return self._over
        now = f"is driven by {self._driver}" if self._driver is not None else "has no driver"
        return RunAlreadyLive(
            f"run '{self._run}' {now}, no longer by {driver}: another `train` took it over, or this one was silent for "
            "too long; the run goes on without this flow run"
        )
