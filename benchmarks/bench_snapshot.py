"""Snapshots of 20,000 live rows, full and incremental, local and S3, against torch.save and TransferQueue.

Everything is interleaved, round by round, in one process; what counts is the ratio within a round. Processor time is
that of the process that saves (for TransferQueue: of all its processes), and hardly depends on what else the machine
does. `torch.save` gets the fsync that a durable file needs, as ours have; TransferQueue's checkpoint has none. It is
measured when `transfer_queue` can be imported.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.live_rows import GENERATIONS, LONG_COLUMNS, LiveState, Saver
from benchmarks.measuring import show, spread
from benchmarks.s3_server import s3_bucket

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1500)]

ROWS = 20_000
NEW_ROWS = 200
TOKENS = 1000
ROUNDS = 5
OURS, INCREMENTAL = "snapshot, all rows new", f"snapshot, {NEW_ROWS} rows new"
PER_ROW, PACKED = "torch.save, a dictionary per row", "torch.save, columns packed"
QUEUE = "TransferQueue, its checkpoint"


@dataclass
class Measured:
    """Rounds of one way to save or read."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def add(self, facts: dict[str, float]) -> None:
        """One round."""
        self.seconds.append(facts["seconds"])
        self.cpu_s.append(facts["cpu_s"])
        self.mib.append(facts.get("added_bytes", 0.0) / 2**20)


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds and processor seconds of this process."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}


def save_durably(build: Callable[[], Any], path: Path) -> dict[str, float]:
    """torch.save of what `build` makes, then what lets the file survive a power cut."""

    def work() -> None:
        with path.open("wb") as file:
            torch.save(build(), file)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    return {**timed(work), "added_bytes": path.stat().st_size}


def packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each long column as one tensor, the others as lists."""
    return {
        name: torch.cat([row[name] for row in rows]) if name in LONG_COLUMNS else [row[name] for row in rows]
        for name in rows[0]
    }


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class TransferQueue:
    """TransferQueue in a process of its own, with as many rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "transfer-queue"
        command = [sys.executable, "-m", "benchmarks.transfer_queue_checkpoint", str(ROWS), str(TOKENS)]
        self._log = (folder / "transfer-queue.log").open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._answer()

    def save(self) -> dict[str, float]:
        """One checkpoint of everything."""
        return {**self._ask("save"), "added_bytes": folder_bytes(self._folder)}

    def load(self) -> dict[str, float]:
        """Load the newest."""
        return self._ask("load")

    def close(self) -> None:
        """End its processes."""
        self._process.communicate(timeout=60)
        self._log.close()

    def _ask(self, what: str) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {self._folder}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise RuntimeError(f"TransferQueue ended: {Path(self._log.name).read_text()[-2000:]}")


@pytest.fixture(scope="module")
def live() -> LiveState:
    """Finished rows alone: what the others save too."""
    state = LiveState(tokens=TOKENS)
    asyncio.run(state.finish(ROWS // GENERATIONS))
    return state


@pytest.fixture(scope="module")
def transfer_queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransferQueue | None]:
    """None where it is not installed."""
    if importlib.util.find_spec("transfer_queue") is None:
        yield None
        return
    queue = TransferQueue(tmp_path_factory.mktemp("queue"))
    yield queue
    queue.close()


async def save_all_ways(live: LiveState, queue: TransferQueue | None, folder: Path) -> dict[str, Measured]:
    """Every way to save, round by round."""
    names = (OURS, INCREMENTAL, PER_ROW, PACKED, *([QUEUE] if queue else []))
    ways = {name: Measured() for name in names}
    steady = Saver(live.parts, folder / "steady")
    await steady.snapshot()
    rows = await live.live_rows()
    for number in range(ROUNDS):
        ways[OURS].add(await Saver(live.parts, folder / f"full-{number}").snapshot())
        shutil.rmtree(folder / f"full-{number}")
        ways[PER_ROW].add(save_durably(lambda: rows, folder / "rows.pt"))
        ways[PACKED].add(save_durably(lambda: packed(rows), folder / "columns.pt"))
        if queue is not None:
            ways[QUEUE].add(queue.save())
        await live.retire(NEW_ROWS // GENERATIONS)
        await live.finish(NEW_ROWS // GENERATIONS)
        ways[INCREMENTAL].add(await steady.snapshot())
    return ways


def table_of(ways: dict[str, Measured], *, against: str) -> list[tuple[str, ...]]:
    """One line each, with how many times the seconds, processor seconds and bytes of one of them."""
    rows = []
    for name, way in ways.items():
        base = ways[against]
        times = (
            spread([a / b for a, b in zip(getattr(way, key), getattr(base, key), strict=True)])
            if name != against and all(getattr(way, key)) and all(getattr(base, key))
            else "-"
            for key in ("seconds", "cpu_s", "mib")
        )
        mib = f"{statistics.median(way.mib):.1f}" if any(way.mib) else "-"
        rows.append((name, spread(way.seconds), spread(way.cpu_s), mib, *times))
    return rows


COLUMNS = ("", "seconds", "CPU seconds", "MiB", "x seconds", "x CPU", "x bytes")


def note_of(queue: TransferQueue | None) -> str:
    """Where TransferQueue is missing, the table says so."""
    return "" if queue is not None else "TransferQueue is not installed here, and not measured."


async def test_an_incremental_snapshot_costs_a_small_part_of_saving_everything(
    live: LiveState, transfer_queue: TransferQueue | None, tmp_path: Path
) -> None:
    ways = await save_all_ways(live, transfer_queue, tmp_path)
    title = f"Saving {ROWS:,} live rows of {TOKENS:,} tokens; times that of a snapshot of which all rows are new"
    show(title, COLUMNS, table_of(ways, against=OURS), note=note_of(transfer_queue))
    whole, part, plain = ways[OURS], ways[INCREMENTAL], ways[PER_ROW]
    assert statistics.median(whole.mib) > 20 * statistics.median(part.mib)
    assert statistics.median(whole.cpu_s) > 2 * statistics.median(part.cpu_s)
    assert statistics.median(plain.mib) > 1.2 * statistics.median(whole.mib)


async def test_reading_and_validating_a_snapshot_against_torch_load(
    live: LiveState, transfer_queue: TransferQueue | None, tmp_path: Path
) -> None:
    saver = Saver(live.parts, tmp_path / "store")
    await saver.snapshot()
    rows = await live.live_rows()
    save_durably(lambda: rows, tmp_path / "rows.pt")
    save_durably(lambda: packed(rows), tmp_path / "columns.pt")
    ours = "snapshot, read and verified"
    ways = {name: Measured() for name in (ours, PER_ROW.replace("save", "load"), PACKED.replace("save", "load"))}
    if transfer_queue is not None:
        transfer_queue.save()
        ways[QUEUE] = Measured()
    for _ in range(ROUNDS):
        ways[ours].add(timed(saver.read))
        for name, file in ((PER_ROW, tmp_path / "rows.pt"), (PACKED, tmp_path / "columns.pt")):
            ways[name.replace("save", "load")].add(timed(partial(torch.load, file, weights_only=True)))
        if transfer_queue is not None:
            ways[QUEUE].add(transfer_queue.load())
    title = f"Reading {ROWS:,} rows; only the snapshot's bytes, schema, ids and digests are compared on the way"
    show(title, COLUMNS, table_of(ways, against=ours), note=note_of(transfer_queue))
    assert len(saver.read().rows) == len(rows)


async def test_a_snapshot_to_s3_against_a_local_one(live: LiveState, tmp_path: Path) -> None:
    names = ("local, all rows new", "S3, all rows new", f"local, {NEW_ROWS} rows new", f"S3, {NEW_ROWS} rows new")
    reading = ("local, read and verified", "S3, read and verified")
    ways, reads = {name: Measured() for name in names}, {name: Measured() for name in reading}
    with s3_bucket() as bucket:
        steady = [Saver(live.parts, tmp_path / "steady"), Saver(live.parts, f"{bucket}/steady")]
        for saver in steady:
            await saver.snapshot()
        for number in range(ROUNDS):
            for name, url in zip(names[:2], (f"{tmp_path}/{number}", f"{bucket}/{number}"), strict=True):
                ways[name].add(await Saver(live.parts, url).snapshot())
            await live.retire(NEW_ROWS // GENERATIONS)
            await live.finish(NEW_ROWS // GENERATIONS)
            for saver, name, read in zip(steady, names[2:], reading, strict=True):
                ways[name].add(await saver.snapshot())
                reads[read].add(timed(saver.read))
    title = f"The same snapshots of {ROWS:,} rows on the local file system and on S3 (moto's server, loopback)"
    show(title, COLUMNS, table_of(ways, against=names[0]))
    show("Reading them", COLUMNS, table_of(reads, against=reading[0]))
