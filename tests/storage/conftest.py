"""Builders of rows, groups and bundles, and a run in a store that writes and restores them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.processes import free_port
from storage.canonical import canonical_json, sha256
from storage.catalog import Selection, select
from storage.checkpoints import CheckpointFiles
from storage.errors import StoreOutcomeUnknown, StoreUnavailable
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import Anchor, Manifest, ManifestLog
from storage.records import (
    AttemptStatus,
    BufferedGroup,
    EpisodeRecord,
    GroupPhase,
    LedgerGroup,
    Progress,
    PromptRef,
    RecoveryLevel,
    RolloutState,
    RowKind,
    SealedSibling,
    Sibling,
    call_key,
    rollout_id,
)
from storage.rows import RowHandle, handles
from storage.run_config import RunConfig
from storage.schemas import ROW_SCHEMAS, row_digest
from storage.snapshot_reader import RestoredBundle, read_bundle
from storage.snapshot_writer import CapturedBundle, SnapshotWriter

Rows = dict[str, RowHandle]


def batch_of(kind: RowKind, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows with their digests, computed from what the batch really holds."""
    plain = pa.RecordBatch.from_pylist([{**row, "digest": ""} for row in rows], schema=ROW_SCHEMAS[kind])
    digests = [row_digest(kind, row) for row in plain.to_pylist()]
    return pa.RecordBatch.from_pylist(
        [{**row, "digest": digest} for row, digest in zip(rows, digests, strict=True)], schema=ROW_SCHEMAS[kind]
    )


class Make:
    """Small, whole records with rows that belong to them."""

    version = 3  # of the weights that finished groups are of

    def prompt(self, prompt_id: int, *, epoch: int = 0) -> PromptRef:
        return PromptRef(prompt_id, epoch, f"{prompt_id:064x}")

    def training_rows(self, prompt: PromptRef, *, generations: int = 2, salt: int = 0) -> Rows:
        rows = [
            {
                "row_id": rollout_id(prompt.group_id, index),
                "group_id": prompt.group_id,
                "prompt_id": prompt.prompt_id,
                "epoch": prompt.epoch,
                "generation_index": index,
                "attempt": 0,
                "token_ids": [1, 2, prompt.prompt_id + 10, index + salt],
                "loss_mask": [False, False, True, True],
                "logprobs": [0.0, 0.0, -0.1 * index, -1.5],
                "version_starts": [0, 2],
                "versions": [-1, self.version],
                "reward": 0.1 + index,
                "masked": False,
                "finish_reason": "stop",
            }
            for index in range(generations)
        ]
        return {row.row_id: row for row in handles(RowKind.TRAINING_ROW, batch_of(RowKind.TRAINING_ROW, rows))}

    def buffered(self, prompt_id: int, *, epoch: int = 0, salt: int = 0) -> tuple[BufferedGroup, Rows]:
        prompt = self.prompt(prompt_id, epoch=epoch)
        rows = self.training_rows(prompt, salt=salt)
        group = BufferedGroup(
            prompt=prompt,
            order=prompt_id,
            target_step=1,
            start_version=0,
            row_ids=tuple(rows),
            rewards=(0.1, 1.1),
            num_tokens=4,
            version_tokens=((self.version, 4),),
        )
        return group, rows

    def ledger_group(
        self, prompt_id: int, *, sealed: int = 1, batch: int = 0, **changes: Any
    ) -> tuple[LedgerGroup, Rows]:
        """An admitted group of two siblings, of which the first `sealed` are sealed and the others running."""
        prompt = self.prompt(prompt_id)
        rows: Rows = {}
        siblings = []
        for index in range(2):
            key = call_key(rollout_id(prompt.group_id, index), attempt=0, turn=0)
            call = {
                "row_id": key,
                "rollout_id": rollout_id(prompt.group_id, index),
                "group_id": prompt.group_id,
                "attempt": 0,
                "turn": 0,
                "parent_key": None,
                "prompt_token_ids": [1, 2],
                "token_ids": [prompt_id, index],
                "logprobs": [-0.25, -0.5],
                "version_starts": [0],
                "versions": [3],
                "finish_reason": "stop",
            }
            if index >= sealed:
                siblings.append(Sibling(index, status=AttemptStatus.DISPATCHED))
                continue
            row = next(handles(RowKind.STAGED_CALL, batch_of(RowKind.STAGED_CALL, [call])))
            rows[key] = row
            result = SealedSibling((key,), (row.digest,), reward=0.5, masked=False, num_tokens=2)
            siblings.append(Sibling(index, status=AttemptStatus.SEALED, sealed=result))
        group = LedgerGroup(
            prompt=prompt,
            level=RecoveryLevel.SIBLING,
            batch=batch,
            order=prompt_id,
            siblings=tuple(siblings),
            phase=GroupPhase.ADMITTED,
            target_step=1,
            start_version=0,
        )
        return replace(group, **changes), rows

    def episode_group(self, prompt_id: int, *, turns: int = 2) -> tuple[LedgerGroup, tuple[EpisodeRecord, ...], Rows]:
        """A group at level `turn`: one sibling, resumed once, is in the middle of its episode, the other just began."""
        group, _ = self.ledger_group(prompt_id, sealed=0, level=RecoveryLevel.TURN)
        rollout = rollout_id(group.group_id, 0)
        calls = [
            {
                "row_id": call_key(rollout, attempt=0, turn=turn),
                "rollout_id": rollout,
                "group_id": group.group_id,
                "attempt": 0,
                "turn": turn,
                "parent_key": call_key(rollout, attempt=0, turn=turn - 1) if turn else None,
                "prompt_token_ids": list(range(2, 4 + 2 * turn)),
                "token_ids": [4 + 2 * turn],
                "logprobs": [-0.5],
                "version_starts": [0],
                "versions": [3],
                "finish_reason": "stop",
            }
            for turn in range(turns)
        ]
        rows = {row.row_id: row for row in handles(RowKind.STAGED_CALL, batch_of(RowKind.STAGED_CALL, calls))}
        state_json = canonical_json({"secret": "k", "asked": turns}).decode()
        episode = EpisodeRecord(
            rollout_id=rollout,
            attempt=1,
            instance="generator-0",
            environment="guess15x4",
            version=1,
            mode="pure",
            seed=7,
            task_json="{}",
            task_digest=sha256(b"{}"),
            turn=turns,
            state_json=state_json,
            state_sha256=sha256(state_json.encode()),
            messages_json='[{"role":"environment","text":"?"}]',
            rewards=(0.0,) * turns,
            calls=tuple(rows),
            weight_versions=(3,) * turns,
            deadline_left_s=599.0,
            parked_s=0.25,
        )
        first, second = group.siblings
        return replace(group, siblings=(replace(first, resumes=1), second)), (episode,), rows

    def state(
        self, *, buffered: tuple[int, ...] = (), ledger: tuple[int, ...] = (), **changes: Any
    ) -> tuple[RolloutState, Rows]:
        """A state with finished and unfinished groups of these prompts, and their rows."""
        rows: Rows = {}
        groups, unfinished = [], []
        for prompt_id in buffered:
            group, own = self.buffered(prompt_id)
            groups.append(group)
            rows |= own
        for prompt_id in ledger:
            entry, own = self.ledger_group(prompt_id)
            unfinished.append(entry)
            rows |= own
        fields: dict[str, Any] = {"progress": Progress(), **changes}
        return RolloutState(ledger=tuple(unfinished), buffer=tuple(groups), **fields), rows


class Run:
    """One controller's access to a run: it has claimed the log."""

    def __init__(self, store: Store, make: Make, *, writer: str = "first", name: str = "demo") -> None:
        self.store = store
        self.layout = RunLayout(name)
        self.log = ManifestLog(store, self.layout, writer)
        self.writer = SnapshotWriter(store, self.layout, self.log)
        self.config = RunConfig(name=name)
        self.make = make

    def claim(self) -> "Run":
        self.log.claim()
        return self

    def bundle(
        self, state: RolloutState, rows: Rows, *, anchor: Manifest | None = None, **changes: Any
    ) -> CapturedBundle:
        fields: dict[str, Any] = {
            "kind": "rollout_snapshot",
            "step": state.progress.train_steps,
            "anchor": Anchor.bootstrap("initial") if anchor is None else Anchor.at(anchor),
            "state": state,
            "rows": rows,
            "cut_time": time.time(),
            "files": (),
            "config": self.config,
            "dataset_fingerprint": "dataset",
        }
        return CapturedBundle(**{**fields, **changes})

    def snapshot(self, *, buffered: tuple[int, ...], anchor: Manifest | None = None, **state: Any) -> Manifest:
        """Publish a rollout snapshot with finished groups of these prompts."""
        progress = Progress(train_steps=0 if anchor is None else anchor.step)
        whole, rows = self.make.state(buffered=buffered, **{"progress": progress, **state})
        return self.writer.write(self.bundle(whole, rows, anchor=anchor))

    def checkpoint(self, step: int, *, buffered: tuple[int, ...] = (), **state: Any) -> Manifest:
        """Publish a trainer checkpoint with two model files."""
        files = CheckpointFiles(self.store, self.layout.checkpoint(step, self.log.writer))
        weights = files.put("model.safetensors", f"weights of step {step}".encode() * 20, "weights")
        entries = (weights, files.put("trainer.json", f'{{"step": {step}}}'.encode(), "optimizer"))
        whole, rows = self.make.state(buffered=buffered, **{"progress": Progress(train_steps=step), **state})
        captured = self.bundle(whole, rows, kind="trainer_checkpoint", step=step, files=entries)
        return self.writer.write(replace(captured, anchor=None))

    def read(self, manifest: Manifest) -> RestoredBundle:
        return read_bundle(self.store, self.layout, manifest)

    def select(self, **how: Any) -> Selection:
        return select(self.store, self.layout, **how)


class StoppingStore:
    """A store whose power fails at the change after `allowed`: from then on nothing is written, read or deleted.

    `lands`: the change during which it fails still happens, but nobody is told.
    """

    def __init__(self, store: Store, *, allowed: int, lands: bool) -> None:
        self._store = store
        self.allowed = allowed
        self._lands = lands
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, path: str, data: bytes) -> None:
        self._write(lambda: self._store.write(path, data), StoreUnavailable(f"write {path}: power failed"))

    def create_exclusive(self, path: str, data: bytes) -> None:
        unknown = StoreOutcomeUnknown(f"create {path}: power failed")
        self._write(lambda: self._store.create_exclusive(path, data), unknown)

    def read(self, path: str) -> bytes:
        if self.writes > self.allowed:
            raise StoreUnavailable(f"read {path}: power failed")
        return self._store.read(path)

    def delete(self, path: str) -> None:
        self._write(lambda: self._store.delete(path), StoreUnavailable(f"delete {path}: power failed"))

    def _write(self, action: Callable[[], None], error: Exception) -> None:
        self.writes += 1
        if self.writes <= self.allowed:
            action()
            return
        if self._lands and self.writes == self.allowed + 1:
            action()
        raise error


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture(scope="session")
def make_once() -> Make:
    """`make` for property tests, which share fixtures between examples."""
    return Make()


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """The stores every test of bundles runs on."""
    return open_store(str(tmp_path / "store") if request.param == "file" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def memory_store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def run(store: Store, make: Make) -> Run:
    return Run(store, make).claim()


@pytest.fixture
def open_run(make: Make) -> Callable[..., Run]:
    """`open_run(store, writer=...)`: another controller of a run."""
    return lambda store, **how: Run(store, make, **how)


@pytest.fixture
def stopping() -> Callable[..., StoppingStore]:
    return StoppingStore


@contextlib.contextmanager
def _s3_server(**settings: str) -> Iterator[str]:
    """A real S3 server process with a bucket `midflight`; yields its address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(f"{address}/moto-api/", server)
        urllib.request.urlopen(urllib.request.Request(f"{address}/midflight", method="PUT")).close()
        yield address
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait(10)


@pytest.fixture(scope="session")
def s3_server() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Starts another S3 server: `with s3_server(SETTING="1") as address`."""
    return _s3_server


S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """A bucket on a real S3 server process; its address is in the environment, as on any machine."""
    with _s3_server() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ENDPOINT_URL": address, **S3_ENVIRONMENT}.items():
            patch.setenv(name, value)
        yield "midflight"


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the S3 test server did not answer at {url}")


@pytest.fixture(scope="session")
def new_run() -> Callable[..., Run]:
    """`open_run` for tests that share one run: `new_run(store, make)`."""
    return Run
