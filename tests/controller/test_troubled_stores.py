"""A slow, failing, full or vanished store costs one attempt: training goes on, the snapshot before it stays."""

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from storage.backends import LocalBackend
from storage.errors import StoreError, StoreUnavailable
from storage.filesystem import GuardedStore

DEADLINE_S = 3.0


class TroubledBackend(LocalBackend):
    """A folder; from its first change of a path with `place` in it on, `effect` comes before every change."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        self.place = ""
        self.effect: Callable[[], None] | None = None
        self.struck = False

    def write(self, path: str, data: bytes) -> None:
        self._strike(path)
        super().write(path, data)

    def create(self, path: str, data: bytes) -> None:
        self._strike(path)
        super().create(path, data)

    def trouble(self, place: str, effect: Callable[[], None]) -> None:
        self.place, self.effect, self.struck = place, effect, False

    def heal(self) -> None:
        self.effect = None

    def _strike(self, path: str) -> None:
        if self.effect is not None and (self.struck or self.place in path):
            self.struck = True
            self.effect()


def _answers(code: str, status: int) -> Callable[[], None]:
    """What botocore raises for an answer of an object store."""

    def answer() -> None:
        facts = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise ClientError(facts, "PutObject")

    return answer


def _fails(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, errno.errorcode[number])

    return fail


class Slow:
    """Calls that don't come back before they are released."""

    def __init__(self) -> None:
        self._released = threading.Event()

    def __call__(self) -> None:
        assert self._released.wait(60)

    def end(self) -> None:
        self._released.set()


class Unmounted:
    """The folder is gone, an empty one is in its place; `end` brings it back as it was."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._aside = root.with_name(f"{root.name}-aside")

    def __call__(self) -> None:
        if not self._aside.exists():
            self._root.rename(self._aside)

    def end(self) -> None:
        shutil.rmtree(self._root)
        self._aside.rename(self._root)


EFFECTS = {
    "slow": (None, r"no answer within 3 s|was not written"),
    "SlowDown": (_answers("SlowDown", 503), "SlowDown"),
    "5xx": (_answers("InternalError", 500), "InternalError"),
    "full disk": (_fails(errno.ENOSPC), "the store is full: free space there"),
    "disk quota": (_fails(errno.EDQUOT), "the store is full"),
    "bucket quota": (_answers("QuotaExceeded", 403), "the store is full"),
    "credentials that expired": (_answers("ExpiredToken", 400), "check its permissions and the credentials"),
    "a wrong clock": (_answers("RequestTimeTooSkewed", 403), r"the clock of this machine differs .* set it \(NTP\)"),
    "unmounted": (None, "was unmounted or replaced. Nothing is published until it is back"),
}


@pytest.fixture
def troubled_world(make_world, tmp_path, troubled):
    """Makes a world on a folder whose backend can be troubled. Train steps alone write nothing."""

    def make(*, deadline_s=60.0):
        world = make_world(algorithm={"max_steps": 8}, checkpointing={"save_period": 100})
        backend = TroubledBackend(tmp_path / "store")
        world.store = troubled(GuardedStore(str(backend.root), backend, deadline_s=deadline_s))
        return world, backend

    return make


PLACES = ("/parts/", "/state/ledger", "/manifests/")
# A store that is replaced between the last look at it and the publication is met by the next attempt.
CASES = [(kind, place) for kind in EFFECTS for place in PLACES if (kind, place) != ("unmounted", "/manifests/")]


@pytest.mark.parametrize(("kind", "place"), CASES)
async def test_k_a_troubled_store_fails_the_attempt_alone(troubled_world, kind, place):
    world, backend = troubled_world(deadline_s=DEADLINE_S if kind == "slow" else 60.0)
    controller = await world.start()
    await world.train(1, 1)
    previous = (await world.snapshot(1)).manifest
    await world.train(2, 2)
    effect, says = EFFECTS[kind]
    lasting = {"slow": Slow, "unmounted": lambda: Unmounted(backend.root)}.get(kind, lambda: None)()
    backend.trouble(place, lasting or effect)
    with pytest.raises(StoreError, match=says) as refused:
        await controller.attempt_snapshot(2, force=True)
    assert refused.value.retryable
    assert str(backend.root) in str(refused.value) or "manifests/" in str(refused.value)
    assert controller.state == "running"
    (report,) = await world.train(3, 3)
    assert (report["step"], world.trace.of("snapshot_attempt")[-1]["outcome"]) == (3, "failed")
    backend.heal()
    if lasting is not None:
        lasting.end()
    assert world.plan().target == previous.sequence
    newest = await world.snapshot(3)
    assert newest.state.progress.train_steps == 3
    await world.kill()
    assert world.plan().target == newest.manifest.sequence
    await world.start()
    await world.train(1, 4)
    assert world.audit().problems == []
    await world.kill()


async def test_k_a_store_that_is_down_for_long_ends_the_run_after_its_budget_and_loses_nothing(troubled_world):
    world, backend = troubled_world()
    controller = await world.start()
    await world.train(1, 1)
    previous = (await world.snapshot(1)).manifest
    backend.trouble("", _answers("ServiceUnavailable", 503))
    for number in range(2, 5):
        assert controller.state == "running"
        with pytest.raises(StoreUnavailable):
            await controller.attempt_snapshot(number, force=True)
    assert controller.state == "failed"
    await world.kill()
    backend.heal()
    assert world.plan().target == previous.sequence
    await world.start()
    await world.train(1, 2)
    assert world.audit().problems == []
    await world.kill()
