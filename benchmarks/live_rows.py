"""Rollout state as a controller holds it, of any size, and a snapshotter of it with a store of its own."""

import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch

from gpu_workers.controller.bundle_publisher import BundlePublisher
from gpu_workers.controller.call_peeker import CallPeeker
from gpu_workers.controller.counted_trace import CountedTrace
from gpu_workers.controller.environment_checkpoint import NoEnvironmentCheckpoint
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import Generator, Trainer
from gpu_workers.controller.published_bundles import PublishedBundles
from gpu_workers.controller.snapshotter import RolloutSnapshotter
from gpu_workers.controller.trainer_checkpoints import TrainerCheckpoints
from storage.catalog import live_bundles
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import Manifest, ManifestLog, read_log
from storage.records import BufferedGroup, PromptRef, RecoveryLevel, RowKind, rollout_id
from storage.run_config import RunConfig
from storage.schemas import TRAINING_ROWS, row_digest
from storage.snapshot_reader import RestoredBundle, read_bundle
from storage.trace import NoTrace

GENERATIONS = 8
LONG_COLUMNS = ("token_ids", "loss_mask", "logprobs")
CONFIG = RunConfig.model_validate(
    {
        "name": "bench",
        "algorithm": {"num_prompts_per_step": 2500, "num_generations_per_prompt": GENERATIONS},
        "data": {"num_prompts": 100_000},
    }
)


class NumberedPrompts:
    """A dataset that no one reads from."""

    def __len__(self) -> int:
        return CONFIG.data.num_prompts

    def prompt(self, ordinal: int) -> tuple[tuple[int, ...], str]:
        """Its number, and no task."""
        return (ordinal,), "{}"

    def agent(self, _ordinal: int) -> str:
        """Nobody."""
        return ""

    def fingerprint(self) -> str:
        """Always the same."""
        return "f" * 64


class LiveState:
    """Parts of a controller, filled with groups of 8 rows of `tokens` tokens each."""

    def __init__(self, *, tokens: int) -> None:
        self._random = np.random.default_rng(5)
        self._tokens = tokens
        self._next = 0
        self.parts = RolloutParts.empty(CONFIG, NumberedPrompts(), CountedTrace(NoTrace()))

    async def finish(self, count: int) -> None:
        """Add finished groups."""
        batches = [group_rows(n, self._random, tokens=self._tokens) for n in range(self._next, self._next + count)]
        async with self.parts.barrier.mutation("finish") as mutation:
            for number, batch in enumerate(batches, start=self._next):
                self.parts.rows.put(mutation, RowKind.TRAINING_ROW, batch)
                self.parts.buffer.add(mutation, buffered(number, batch))
        self._next += count

    async def promise(self, count: int) -> None:
        """Add running groups."""
        async with self.parts.barrier.mutation("promise") as mutation:
            for number in range(self._next, self._next + count):
                self.parts.ledger.reserve(
                    mutation, prompt(number), level=RecoveryLevel.SIBLING, batch=number, order=number, size=GENERATIONS
                )
                self.parts.ledger.admit(mutation, number, target_step=1, start_version=0)
                self.parts.ledger.dispatch(mutation, prompt(number).group_id)
        self._next += count

    async def retire(self, count: int) -> None:
        """Let go of the oldest finished groups, as a train step does."""
        async with self.parts.barrier.mutation("retire") as mutation:
            oldest = self.parts.buffer.ready()[:count]
            self.parts.rows.remove(mutation, [row for group in oldest for row in group.row_ids])
            self.parts.buffer.drop(mutation, oldest)

    async def live_rows(self) -> list[dict[str, Any]]:
        """Every finished row as a dictionary, its long columns as tensors: what one would save by hand."""
        async with self.parts.barrier.cut("copy") as cut:
            handles = list(self.parts.rows.capture(cut).values())
        return [
            {
                name: torch.from_numpy(value.values.to_numpy(zero_copy_only=False).copy())
                if name in LONG_COLUMNS
                else value.as_py()
                for name, value in zip(
                    handle.batch.schema.names, (c[handle.index] for c in handle.batch.columns), strict=True
                )
            }
            for handle in handles
        ]


class Saver:
    """A snapshotter of these parts with a store of its own."""

    def __init__(self, parts: RolloutParts, url: str | Path) -> None:
        self.store: Store = open_store(str(url))
        self.layout = RunLayout(CONFIG.name)
        log = ManifestLog(self.store, self.layout, "bench")
        log.claim()
        keeping, snapshots = CONFIG.checkpointing, CONFIG.rollout_checkpointing
        bundles = PublishedBundles(self.store, self.layout, log, checkpointing=keeping, snapshots=snapshots)
        self._publisher = BundlePublisher(parts, bundles, identity="f" * 64)
        checkpoints = TrainerCheckpoints(parts, cast("Trainer", None), self._publisher)  # none is ever saved
        self._snapshotter = RolloutSnapshotter(
            parts, self._publisher, checkpoints, NoEnvironmentCheckpoint(), CallPeeker(parts, cast("Generator", None))
        )
        self._attempts = 0

    async def snapshot(self) -> dict[str, float]:
        """One snapshot: its facts, the bytes it added to the store, its seconds, those of processor time (this
        process)."""
        self._attempts += 1
        before, started, cpu = self._stored(), time.perf_counter(), time.process_time()
        outcome = await self._snapshotter.attempt(self._attempts, force=True)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        assert outcome.outcome == "completed", outcome
        after = self._stored()
        added = sum(size for path, size in after.items() if path not in before)
        return {**(outcome.facts or {}), "added_bytes": added, "seconds": seconds, "cpu_s": cpu_s}

    async def cut_ms(self) -> float:
        """How long one cut was held."""
        return (await self._publisher.capture(model_step=0)).cut_ms

    def read(self) -> RestoredBundle:
        """The newest snapshot, read and verified as a restore does."""
        return read_bundle(self.store, self.layout, self.newest())

    def newest(self) -> Manifest:
        """The manifest of the newest snapshot."""
        return live_bundles(read_log(self.store, self.layout))[1][-1]

    def _stored(self) -> dict[str, int]:
        return {path: self.store.size(path) for path in self.store.list(CONFIG.name)}


def prompt(number: int) -> PromptRef:
    """The prompt of the group with this number."""
    return PromptRef(number, 0, f"{number:064x}")


def group_rows(number: int, random: np.random.Generator, *, tokens: int) -> pa.RecordBatch:
    """One finished group's training rows; the first tenth of the tokens is the prompt."""
    rows = []
    start = tokens // 10
    for index in range(GENERATIONS):
        row: dict[str, Any] = {
            "row_id": rollout_id(prompt(number).group_id, index),
            "group_id": prompt(number).group_id,
        }
        row |= {"prompt_id": number, "epoch": 0, "generation_index": index, "attempt": 0}
        row |= {"token_ids": random.integers(0, 150_000, tokens, dtype=np.int32)}
        row |= {"loss_mask": np.arange(tokens) >= start, "logprobs": -random.random(tokens, dtype=np.float32)}
        row |= {
            "version_starts": [0, start],
            "versions": [-1, 3],
            "reward": 0.5,
            "masked": False,
            "finish_reason": "stop",
        }
        row["digest"] = row_digest(RowKind.TRAINING_ROW, row)
        rows.append(row)
    return pa.RecordBatch.from_pylist(rows, schema=TRAINING_ROWS)


def buffered(number: int, batch: pa.RecordBatch) -> BufferedGroup:
    """The replay buffer's record of one group."""
    ids = tuple(batch.column("row_id").to_pylist())
    generated = sum(map(sum, batch.column("loss_mask").to_pylist()))
    return BufferedGroup(prompt(number), number, 0, 0, ids, (0.5,) * GENERATIONS, generated, ((3, generated),))
