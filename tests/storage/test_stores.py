"""One suite that every store passes: local files, memory, and S3 through a real server."""

import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.backends import LocalBackend, MemoryBackend
from storage.errors import (
    AlreadyExists,
    ConfigurationError,
    NotFound,
    StoreError,
    StoreOutcomeUnknown,
    StoreUnavailable,
    StoreUnsuitable,
)
from storage.filesystem import GuardedStore, Store, open_store
from storage.manifests import ManifestLog


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.system)])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return open_store(str(tmp_path / "a" / "store"))
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}")
    return open_store(f"s3://{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}")


def test_what_was_written_is_read_back(any_store: Store) -> None:
    any_store.write("run/parts/a.parquet", b"\0\1\2")
    assert any_store.read("run/parts/a.parquet") == b"\0\1\2"
    assert any_store.size("run/parts/a.parquet") == 3
    assert any_store.exists("run/parts/a.parquet")
    assert any_store.age_s("run/parts/a.parquet") < 60


def test_writing_again_replaces(any_store: Store) -> None:
    any_store.write("run/a", b"first")
    any_store.write("run/a", b"second, longer")
    assert any_store.read("run/a") == b"second, longer"
    assert any_store.list("") == ["run/a"]


def test_what_is_absent_is_not_found_by_name(any_store: Store) -> None:
    for call in (any_store.read, any_store.size, any_store.age_s):
        with pytest.raises(NotFound, match="run/absent"):
            call("run/absent")
    assert not any_store.exists("run/absent")
    assert any_store.list("run") == []


def test_a_listing_is_sorted_recursive_and_of_that_folder_only(any_store: Store) -> None:
    for path in ("run/b", "run/a/2", "run/a/1", "run-other/a", "runs"):
        any_store.write(path, b"x")
    assert any_store.list("run") == ["run/a/1", "run/a/2", "run/b"]
    assert any_store.list("run/") == ["run/a/1", "run/a/2", "run/b"]
    assert any_store.list("") == ["run-other/a", "run/a/1", "run/a/2", "run/b", "runs"]


def test_a_name_is_created_once(any_store: Store) -> None:
    any_store.create_exclusive("run/slot", b"first")
    with pytest.raises(AlreadyExists, match="run/slot"):
        any_store.create_exclusive("run/slot", b"second")
    assert any_store.read("run/slot") == b"first"


def test_of_eight_threads_that_race_for_a_name_one_wins(any_store: Store) -> None:
    for race in range(5):
        won = _race(any_store, f"run/slot-{race}", threads=8)
        assert len(won) == 1
        assert any_store.read(f"run/slot-{race}") == f"writer {won[0]}".encode()


def _race(store: Store, path: str, *, threads: int) -> list[int]:
    start, won = threading.Barrier(threads), list[int]()

    def create(number: int) -> None:
        start.wait()
        try:
            store.create_exclusive(path, f"writer {number}".encode())
            won.append(number)
        except AlreadyExists:
            return

    racers = [threading.Thread(target=create, args=(number,)) for number in range(threads)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    return won


def test_deleting_is_done_once_and_may_be_repeated(any_store: Store) -> None:
    any_store.write("run/a", b"x")
    any_store.delete("run/a")
    any_store.delete("run/a")
    assert any_store.list("") == []
    any_store.create_exclusive("run/a", b"again")


def test_the_probe_accepts_it_and_leaves_nothing(any_store: Store) -> None:
    any_store.probe()
    assert any_store.list("") == []


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "run/../../outside", "", "run//a", "run/.", "a\\b"])
def test_no_path_leaves_the_store(any_store: Store, path: str) -> None:
    for call in (
        lambda: any_store.read(path),
        lambda: any_store.write(path, b""),
        lambda: any_store.create_exclusive(path, b""),
        lambda: any_store.delete(path),
    ):
        with pytest.raises(StoreError, match="not a relative path"):
            call()


def test_only_local_stores_have_local_paths(any_store: Store) -> None:
    path = any_store.local_path("run/a")
    any_store.write("run/a", b"x")
    assert path is None or path.read_bytes() == b"x"


def test_a_run_is_taken_over_and_fenced(any_store: Store, open_run: Callable[..., Any]) -> None:
    run = open_run(any_store, writer="first").claim()
    manifest = run.snapshot(buffered=(1, 2))
    assert run.read(run.select().target).manifest == manifest
    assert isinstance(run.log, ManifestLog)
    assert open_run(any_store, writer="second").claim().log.last_seen == 2


class Slow(MemoryBackend):
    """Hangs in every call."""

    def read(self, path: str) -> bytes:
        time.sleep(1)
        return b""

    def write(self, path: str, data: bytes) -> None:
        time.sleep(1)

    def create(self, path: str, data: bytes) -> None:
        time.sleep(1)


def test_a_store_that_hangs_is_given_up_at_the_deadline_by_name() -> None:
    store = GuardedStore("slow://", Slow(), deadline_s=0.05)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"write run/a \(3 bytes\): no answer within 0.05 s"):
        store.write("run/a", b"abc")
    with pytest.raises(StoreUnavailable, match="read run/a"):
        store.read("run/a")
    assert time.monotonic() - started < 0.8


def test_a_creation_that_timed_out_is_unknown_rather_than_refused() -> None:
    store = GuardedStore("slow://", Slow(), deadline_s=0.05)
    with pytest.raises(StoreOutcomeUnknown, match=r"create run/slot \(3 bytes\)"):
        store.create_exclusive("run/slot", b"abc")


class Careless(MemoryBackend):
    """Creates a name as often as it is asked to."""

    def create(self, path: str, data: bytes) -> None:
        self.write(path, data)


def test_a_store_without_exclusive_creation_is_refused() -> None:
    store = GuardedStore("careless://", Careless(), deadline_s=1)
    with pytest.raises(StoreUnsuitable, match="twice"):
        store.probe()
    assert store.list("") == []


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnsuitable, match="can't be written"):
        open_store(str(tmp_path / "file" / "store")).probe()


@pytest.mark.parametrize("url", ["nowhere://bucket/store", "s4://x"])
def test_an_unknown_protocol_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigurationError, match="store.url"):
        open_store(url)


def test_opening_a_store_touches_nothing(tmp_path: Path) -> None:
    open_store(str(tmp_path / "new" / "store"))
    open_store(f"file://{tmp_path}/other")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_local_write_is_not_listed_and_is_tidied_after_a_day(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.write("run/a", b"x")
    left = tmp_path / "run" / ".b.0123.midflight-tmp"
    left.write_bytes(b"half")
    assert backend.list("") == ["run/a"]
    backend.tidy()
    assert left.exists()
    os.utime(left, (0, 0))
    backend.tidy()
    assert not left.exists()
    assert backend.list("") == ["run/a"]
