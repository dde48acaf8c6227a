"""Who holds a run: each controller's sign of life beside the manifest log, and when another one may claim the run.

    written before the claim --rewritten every BEAT_S--> removed at a clean end, or when the controller was fenced

The log alone says which controller may publish, and keeps that promise whatever is written here. These records let a
second controller be refused by the name of the first, before it would fence it. Clocks are not compared: an owner is
known to live when its record changes while somebody looks.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from storage.canonical import canonical_json
from storage.errors import Fenced, NotFound, RunAlreadyLive, StoreError
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import Manifest, ManifestLog, read_log

logger = logging.getLogger(__name__)

BEAT_S = 5.0
# Six beats that did not come, seen by the one who waits.
SILENCE_S = 30.0
# Older records need no waiting: no two clocks are that far apart.
LONG_SILENCE_S = 600.0
_POLL_S = 0.5
_SAME_START_S = 0.05


@dataclass(frozen=True, slots=True)
class Owner:
    """A controller process. `pid` and `started` (Unix seconds) mean something on `machine` only: one boot of a host,
    one namespace of process ids. `driver` is the flow run that trains, None between two of them. `beat` counts up.
    """

    writer: str
    host: str
    machine: str
    pid: int
    started: float
    driver: str | None = None
    beat: int = 0

    @staticmethod
    def this_process(writer: str) -> "Owner":
        """The calling process, under the token by which it publishes."""
        return Owner(writer, socket.gethostname(), _this_machine(), os.getpid(), psutil.Process().create_time())

    def is_dead(self) -> bool:
        """Whether its process is certainly over; that of another machine may live."""
        if self.machine != _this_machine():
            return False
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) <= _SAME_START_S
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        driver = "no flow run at the moment" if self.driver is None else self.driver
        return f"controller {self.writer} (pid {self.pid} on {self.host}), driven by {driver}"


_OWNER = TypeAdapter(Owner)


def newest_claim(store: Store, layout: RunLayout) -> Manifest | None:
    """The claim that holds the run; None before the first. Raises StoreUnavailable."""
    claims = [slot for slot in read_log(store, layout) if isinstance(slot, Manifest) and slot.kind == "claim"]
    return claims[-1] if claims else None


def read_owner(store: Store, layout: RunLayout, writer: str) -> Owner | None:
    """The record of a controller; None when it ended in order, never wrote one, or wrote what can't be read."""
    try:
        return _OWNER.validate_json(store.read(layout.owner(writer)), strict=True)
    except (NotFound, ValueError):  # pydantic's errors are ValueErrors
        return None


def await_claimable(
    store: Store,
    layout: RunLayout,
    *,
    silence_s: float = SILENCE_S,
    poll_s: float = _POLL_S,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Return when nobody is known to hold the run any more: the slot of the claim that may be followed, or -1.

    At once when the newest claim's controller ended in order or its process is dead; otherwise when its record did not
    change for `silence_s`. Raises: RunAlreadyLive, naming the owner, as soon as it gives a sign of life;
    StoreUnavailable.
    """
    claim = newest_claim(store, layout)
    if claim is None:
        return -1
    first = owner = read_owner(store, layout, claim.writer)
    started = clock()
    while owner is not None and not owner.is_dead():
        assert first is not None
        if owner.beat != first.beat:
            raise RunAlreadyLive(_held(layout, store, owner))
        if clock() - started >= silence_s or _age_s(store, layout, owner) >= LONG_SILENCE_S:
            logger.warning("run %s: %s was silent for %.0f s and is taken for dead", layout.run, owner, silence_s)
            break
        time.sleep(poll_s)
        owner = read_owner(store, layout, claim.writer)
    return claim.sequence


def claim(store: Store, layout: RunLayout, log: ManifestLog, *, after: int | None) -> Manifest:
    """Take the run over: every earlier controller is fenced from now on. Records of dead ones are removed.

    `after` is what `await_claimable` returned; None takes the run over from whoever holds it. Raises: RunAlreadyLive
    when another controller has claimed since; StoreError.
    """
    if after is not None:
        newest = newest_claim(store, layout)
        if newest is not None and newest.sequence > after:
            owner = read_owner(store, layout, newest.writer)
            raise RunAlreadyLive(_held(layout, store, owner or newest.writer))
    claimed = log.claim()
    try:
        _forget_dead(store, layout, but=log.writer)
    except StoreError as error:
        logger.warning("signs of life of dead controllers of %s stay: %s", layout.run, error)
    return claimed


def _forget_dead(store: Store, layout: RunLayout, *, but: str) -> None:
    for path in store.list(layout.owners):
        writer = path.rpartition("/")[2].removesuffix(".json")
        owner = read_owner(store, layout, writer)
        if writer != but and (owner is None or owner.is_dead()):
            store.delete(path)


class SignOfLife:
    """Rewrites one controller's record in a thread, and looks whether another controller has taken the run over.

    `driver` tells who drives; `on_fenced` is called once, from that thread, with the error. A store that fails is
    asked again at the next beat: what is not written looks like silence to others.
    """

    def __init__(
        self,
        store: Store,
        layout: RunLayout,
        log: ManifestLog,
        *,
        driver: Callable[[], str | None],
        on_fenced: Callable[[Fenced], None],
        beat_s: float = BEAT_S,
    ) -> None:
        self._store = store
        self._path = layout.owner(log.writer)
        self._log = log
        self._driver = driver
        self._on_fenced = on_fenced
        self._beat_s = beat_s
        self._owner = Owner.this_process(log.writer)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="midflight-sign-of-life", daemon=True)

    def begin(self) -> None:
        """Write the first record, before the run is claimed: a claim without one counts as given up."""
        self._write()

    def keep(self) -> None:
        """Go on by itself, after the claim."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and leave nothing: the run is free."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            self._store.delete(self._path)
        except StoreError as error:
            logger.warning("the sign of life %s stays for %.0f s more: %s", self._path, SILENCE_S, error)

    def _run(self) -> None:
        while not self._closing.wait(self._beat_s):
            try:
                self._write()
                self._log.refuse_when_lost()
            except Fenced as fenced:
                self._on_fenced(fenced)
                return
            except StoreError as error:
                logger.warning("the sign of life could not be written: %s", error)

    def _write(self) -> None:
        self._owner = replace(self._owner, driver=self._driver(), beat=self._owner.beat + 1)
        self._store.write(self._path, canonical_json(asdict(self._owner)) + b"\n")


def _held(layout: RunLayout, store: Store, owner: Owner | str) -> str:
    seen = f", seen {_age_s(store, layout, owner):.0f} s ago" if isinstance(owner, Owner) else ""
    return (
        f"run '{layout.run}' in {store.url} is held by {owner}{seen}: wait for it, end it, or take the run over with "
        f"--take-over, which lets that controller publish nothing more"
    )


def _age_s(store: Store, layout: RunLayout, owner: Owner) -> float:
    try:
        return max(store.age_s(layout.owner(owner.writer)), 0.0)
    except NotFound:
        return LONG_SILENCE_S


def _this_machine() -> str:
    """This boot of this host, and the namespace in which its process ids count."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # Linux only
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)
