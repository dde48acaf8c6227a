"""Who holds a run in the store: a living owner is refused to others by name, a dead or silent one is followed."""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from storage.canonical import canonical_json
from storage.errors import Fenced, RunAlreadyLive, StoreUnavailable
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import ManifestDraft, ManifestLog, read_log
from storage.ownership import Owner, SignOfLife, await_claimable, claim, newest_claim, read_owner

LAYOUT = RunLayout("demo")
AT_ONCE, NEVER = 0.0, 1e9


class Controller:
    """A claim and a sign of life, without anything to publish."""

    def __init__(self, store: Store, writer: str = "first", *, after: int | None = None, beat_s: float = 0.01) -> None:
        self.log = ManifestLog(store, LAYOUT, writer)
        self.fenced: list[Fenced] = []
        self.heard = threading.Event()
        self.life = SignOfLife(
            store, LAYOUT, self.log, driver=lambda: "train-demo", on_fenced=self._hear, beat_s=beat_s
        )
        self.life.begin()
        claim(store, LAYOUT, self.log, after=after)

    def _hear(self, error: Fenced) -> None:
        self.fenced.append(error)
        self.heard.set()


@pytest.fixture
def record(memory_store: Store) -> Callable[..., Owner]:
    """Writes the record of the controller that has claimed the run, as seen from another machine."""

    def write(**changes: object) -> Owner:
        ManifestLog(memory_store, LAYOUT, "first").claim()
        owner = replace(Owner.this_process("first"), host="gpu-7", machine="gpu-7 another boot", driver="train-demo")
        owner = replace(owner, **changes)
        memory_store.write(LAYOUT.owner("first"), canonical_json(asdict(owner)))
        return owner

    return write


def test_a_run_without_a_claim_may_be_claimed(store):
    assert await_claimable(store, LAYOUT, silence_s=NEVER) == -1


def test_a_living_owner_is_refused_to_others_by_name_and_last_sign(store):
    controller = Controller(store)
    controller.life.keep()
    with pytest.raises(
        RunAlreadyLive, match=r"held by controller first \(pid \d+ on .*train-demo, seen .* --take-over"
    ):
        await_claimable(store, LAYOUT, silence_s=NEVER, poll_s=0.01)
    controller.life.close()


def test_an_owner_that_ended_in_order_leaves_the_run_free(store):
    controller = Controller(store)
    controller.life.keep()
    controller.life.close()
    assert store.list(LAYOUT.owners) == []
    assert await_claimable(store, LAYOUT, silence_s=NEVER) == 0


def test_a_killed_process_of_this_machine_holds_nothing(memory_store, record):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    this = Owner.this_process("first")
    record(host=this.host, machine=this.machine, pid=process.pid, started=1.0)  # a pid that was given away again
    assert await_claimable(memory_store, LAYOUT, silence_s=NEVER) == 0
    process.kill()
    process.communicate()
    record(host=this.host, machine=this.machine, pid=process.pid)
    assert await_claimable(memory_store, LAYOUT, silence_s=NEVER) == 1


def test_an_owner_of_another_machine_is_taken_for_dead_after_its_silence(memory_store, record):
    record()
    assert await_claimable(memory_store, LAYOUT, silence_s=AT_ONCE) == 0


def test_the_silence_is_that_which_the_waiting_one_has_seen(memory_store, record):
    seconds = iter(range(100))
    record()
    looks = []

    class Watched:
        def __getattr__(self, name):
            return getattr(memory_store, name)

        def read(self, path):
            looks.append(path)
            return memory_store.read(path)

    await_claimable(Watched(), LAYOUT, silence_s=20, poll_s=0, clock=lambda: next(seconds))
    assert looks.count(LAYOUT.owner("first")) == 20


def test_a_record_that_cannot_be_read_holds_nothing(memory_store, record):
    record()
    memory_store.write(LAYOUT.owner("first"), b'{"writer": 1')
    assert read_owner(memory_store, LAYOUT, "first") is None
    assert await_claimable(memory_store, LAYOUT, silence_s=NEVER) == 0


def test_a_claim_that_came_in_between_is_not_followed(store):
    Controller(store).life.close()
    after = await_claimable(store, LAYOUT, silence_s=NEVER)
    Controller(store, "second", after=after)
    with pytest.raises(RunAlreadyLive, match="controller second"):
        Controller(store, "third", after=after)
    assert newest_claim(store, LAYOUT).writer == "second"


def test_a_take_over_asks_nobody_and_the_owner_hears_of_it_without_publishing(store):
    first = Controller(store)
    first.life.keep()
    second = Controller(store, "second", after=None)
    assert first.heard.wait(20)
    assert "'first' was fenced by 'second'" in str(first.fenced[0])
    with pytest.raises(Fenced):
        first.log.append(ManifestDraft(kind="rollout_snapshot"))
    first.life.close()
    assert store.list(LAYOUT.owners) == [LAYOUT.owner("second")]
    second.log.append(ManifestDraft(kind="rollout_snapshot"))
    assert [slot.writer for slot in read_log(store, LAYOUT)] == ["first", "second", "second"]


def test_own_publications_are_no_fence(store):
    first = Controller(store)
    for _ in range(3):
        first.log.append(ManifestDraft(kind="rollout_snapshot"))
        first.log.refuse_when_lost()


def test_a_claim_clears_up_after_dead_controllers(memory_store, record):
    this = Owner.this_process("first")
    record(host=this.host, machine=this.machine, pid=this.pid, started=1.0)
    Controller(memory_store, "second", after=0)
    assert memory_store.list(LAYOUT.owners) == [LAYOUT.owner("second")]


def test_a_store_that_fails_ends_no_sign_of_life(store, troubled):
    shaky = troubled(store)
    controller = Controller(shaky)
    shaky.fail("write", "owners", StoreUnavailable("no answer"))
    shaky.fail("read", "manifests", StoreUnavailable("no answer"))
    controller.life.keep()
    Controller(store, "second", after=None)
    assert controller.heard.wait(20)
    assert not shaky.troubles
    controller.life.close()


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"pid": "x"}', b'{"writer": 1, "host": null}'])
def test_a_record_that_can_not_be_read_counts_as_none(memory_store, content):
    layout = RunLayout("run")
    memory_store.write(layout.owner("writer"), content)
    assert read_owner(memory_store, layout, "writer") is None


def test_a_record_whose_values_have_other_types_counts_as_none(memory_store):
    layout = RunLayout("run")
    record = asdict(Owner.this_process("writer"))
    memory_store.write(layout.owner("writer"), canonical_json(record))
    assert read_owner(memory_store, layout, "writer") == Owner.this_process("writer")
    memory_store.write(layout.owner("writer"), canonical_json({**record, "pid": str(record["pid"])}))
    assert read_owner(memory_store, layout, "writer") is None
