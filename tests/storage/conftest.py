"""Builders of rows, groups and bundles, and a run in a store that writes and restores them."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage.canonical import canonical_json, sha256
from storage.catalog import Selection, select
from storage.checkpoints import CheckpointFiles
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import Anchor, Manifest, ManifestLog
from storage.records import (
    AttemptStatus,
    BufferedGroup,
    CallSampling,
    EpisodeRecord,
    GroupPhase,
    LedgerGroup,
    PartialCall,
    Progress,
    PromptRef,
    RecoveryLevel,
    RolloutState,
    RowKind,
    SealedSibling,
    Sibling,
    call_key,
    partial_key,
    rollout_id,
)
from storage.rows import RowHandle, handles
from storage.run_config import RunConfig
from storage.schemas import ROW_SCHEMAS, prompt_digest, row_digest
from storage.snapshot_reader import RestoredBundle, read_bundle
from storage.snapshot_writer import CapturedBundle, SnapshotWriter
from tests.storage.s3_server import S3_ENVIRONMENT, started_s3_server
from tests.storage.stopping_store import StoppingStore

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

    def row(self, kind: RowKind, row: dict[str, Any]) -> RowHandle:
        """One row with its digest."""
        return next(handles(kind, batch_of(kind, [row])))

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

    def partial_call(
        self, group: LedgerGroup, index: int, *, turn: int = 0, cuts: tuple[int, ...] = (3, 5), **changes: Any
    ) -> tuple[PartialCall, Rows]:
        """The running call of a sibling, with as many tokens as the last of `cuts`, and its rows: one up to each of
        them.
        """
        sibling, rollout = group.siblings[index], rollout_id(group.group_id, index)
        key = call_key(rollout, attempt=sibling.attempt, turn=turn)
        bounds = list(zip((0, *cuts), cuts, strict=False))
        chunks = [
            {
                "row_id": partial_key(key, start=start, end=end),
                "rollout_id": rollout,
                "group_id": group.group_id,
                "attempt": sibling.attempt,
                "turn": turn,
                "start": start,
                "token_ids": list(range(100 + start, 100 + end)),
                "logprobs": [-0.5 - place for place in range(start, end)],
                "version_starts": [0],
                "versions": [self.version + (start > 0)],
            }
            for start, end in bounds
        ]
        rows = {row.row_id: row for row in handles(RowKind.PARTIAL_TOKENS, batch_of(RowKind.PARTIAL_TOKENS, chunks))}
        call = PartialCall(
            rollout_id=rollout,
            attempt=sibling.attempt,
            turn=turn,
            prompt_tokens=2,
            prompt_digest=prompt_digest([1, 2]),
            sampling=CallSampling("counter", 2**63 - 1 - index, 0.7, 1.0, (0, 2)),
            chunks=tuple(rows),
            num_tokens=cuts[-1],
        )
        return replace(call, **changes), rows

    def prefix_group(
        self, prompt_id: int, *, cuts: tuple[int, ...] = (3, 5)
    ) -> tuple[LedgerGroup, tuple[PartialCall, ...], Rows]:
        """A group at level `prefix`: one sibling is sealed, the other is in the middle of its response."""
        group, rows = self.ledger_group(prompt_id, level=RecoveryLevel.PREFIX)
        call, chunks = self.partial_call(group, 1, cuts=cuts)
        return group, (call,), rows | chunks

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


@pytest.fixture(scope="session")
def s3_server() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Starts another S3 server: `with s3_server(SETTING="1") as address`."""
    return started_s3_server


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """A bucket on a real S3 server process; its address is in the environment, as on any machine."""
    with started_s3_server() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ENDPOINT_URL": address, **S3_ENVIRONMENT}.items():
            patch.setenv(name, value)
        yield "midflight"


@pytest.fixture(scope="session")
def new_run() -> Callable[..., Run]:
    """`open_run` for tests that share one run: `new_run(store, make)`."""
    return Run
