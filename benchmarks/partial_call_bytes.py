"""What the tokens of running calls add to snapshots: `python -m benchmarks.partial_call_bytes`.

256 calls of one simulated engine run together and do not end; the real controller takes snapshots of them while they
grow. Token ids are drawn from a vocabulary of 150,000 and log-probabilities from a continuous distribution, so that
they are as hard to compress as any. Bytes of new parts per new token, beside one part with all tokens of that moment.
"""

import argparse
import asyncio
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.length_distribution import LengthDistribution
from benchmarks.measuring import show
from benchmarks.timed_player import NoModel, TimedPlayer
from gpu_workers.controller.ports import KnownCall, Peek, PeekedCall
from gpu_workers.controller.published_bundles import PublishedBundles
from gpu_workers.controller.restorer import RestorePlan
from gpu_workers.controller.single_controller import SingleController
from gpu_workers.environments.tasks import build_task
from storage.canonical import sha256
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import Manifest, ManifestLog
from storage.parts import encode_part
from storage.records import RowKind, partial_key
from storage.rows import handles
from storage.run_config import RunConfig
from storage.schemas import PARTIAL_TOKENS, row_digest

GROUPS, SIBLINGS = 32, 8
CALLS = GROUPS * SIBLINGS
VOCABULARY = 150_000
REFIT_EVERY = 100


class LongCalls(TimedPlayer):
    """A generator whose calls run for ever; nobody's time passes but when it is told so."""

    def __init__(self, config: RunConfig, limit: int) -> None:
        lengths = LengthDistribution(minimum=limit, parts=((1.0, 1e9),), limit=limit)
        super().__init__(config, build_task(config.data), lengths, sequences=CALLS, token_s=1.0)
        self._limit = limit
        self._ticks = 0

    def tick(self) -> None:
        """A token for each call; new weights now and then."""
        if self._ticks % REFIT_EVERY == 0:
            self.engine.refit(self._ticks // REFIT_EVERY)
        self.engine.tick()
        self._ticks += 1

    async def all_asked(self) -> None:
        """Until the engine has been asked for every call."""
        for _ in range(6000):
            if self.engine.num_requests == CALLS:
                return
            await asyncio.sleep(0.01)
        raise RuntimeError(f"of {CALLS} calls, {self.engine.num_requests} came to the engine within a minute")

    async def peek(self, wanted: Mapping[str, KnownCall]) -> Peek:
        """As it is, with numbers that look like a model's."""
        found = await super().peek(wanted)
        return replace(found, calls=tuple(map(self._drawn, found.calls)))

    def _drawn(self, call: PeekedCall) -> PeekedCall:
        draw = np.random.default_rng(zlib.crc32(call.rollout_id.encode()))
        token_ids = draw.integers(VOCABULARY, size=self._limit, dtype=np.int32)
        logprobs = -draw.exponential(size=self._limit).astype(np.float32)
        end = call.start + len(call.sampled)
        sampled = replace(call.sampled, token_ids=token_ids[call.start : end], logprobs=logprobs[call.start : end])
        return replace(call, sampled=sampled)


class Silent:
    """A trace that keeps nothing."""

    def record(self, event: str, **fields: Any) -> None:
        """As in the port `Trace`."""


@dataclass(frozen=True, slots=True)
class Added:
    """One snapshot: tokens of each call by then, and bytes that were written for them: rows, and all else that is new.

    `whole`: bytes of one part with all tokens.
    """

    tokens: int
    rows: int
    others: int
    whole: int


def added(manifest: Manifest, earlier: set[str], tokens: int, whole: int) -> Added:
    """What this snapshot wrote beyond earlier ones."""
    files = [file for file in manifest.files if file.path not in earlier]
    rows = sum(file.bytes for file in files if file.kind == RowKind.PARTIAL_TOKENS.value and file.role == "part")
    return Added(tokens, rows, sum(file.bytes for file in files) - rows, whole)


def whole_bytes(calls: tuple[PeekedCall, ...], layout: RunLayout) -> int:
    """Bytes of a part that has all tokens of all calls in it."""
    rows: list[dict[str, Any]] = []
    for call in calls:
        row: dict[str, Any] = {
            "row_id": partial_key(f"{call.rollout_id}/a0/t0", start=0, end=len(call.sampled)),
            "rollout_id": call.rollout_id,
            "group_id": call.rollout_id.rpartition("_g")[0],
            "attempt": call.attempt,
            "turn": call.turn,
            "start": 0,
            "token_ids": call.sampled.token_ids,
            "logprobs": call.sampled.logprobs,
            "version_starts": call.sampled.version_starts,
            "versions": call.sampled.versions,
        }
        rows.append({**row, "digest": row_digest(RowKind.PARTIAL_TOKENS, row)})
    columns = {name: [row[name] for row in rows] for name in PARTIAL_TOKENS.names}
    batch = pa.RecordBatch.from_pydict(columns, schema=PARTIAL_TOKENS)
    return len(encode_part({row.row_id: row for row in handles(RowKind.PARTIAL_TOKENS, batch)}, layout, writer="x")[1])


async def grow(config: RunConfig, folder: str, *, snapshots: int, tokens: int) -> list[Added]:
    """A snapshot each time that all calls have so many more tokens."""
    store, layout = open_store(folder), RunLayout(config.name)
    log = ManifestLog(store, layout, sha256(b"bytes"))
    log.claim()
    player = LongCalls(config, (snapshots + 1) * tokens)
    controller = SingleController(
        config,
        dataset=build_task(config.data),
        trainer=NoModel(),
        generator=player,
        bundles=PublishedBundles(
            store, layout, log, checkpointing=config.checkpointing, snapshots=config.rollout_checkpointing
        ),
        trace=Silent(),
        environments=[],
        incarnation=log.writer,
    )
    await controller.restore(RestorePlan(None, None))
    training = asyncio.create_task(controller.train_steps(1, 1))
    await player.all_asked()
    results: list[Added] = []
    earlier: set[str] = set()
    for number in range(1, snapshots + 1):
        for _ in range(tokens):
            player.tick()
        outcome = await controller.attempt_snapshot(number, force=True)
        slots = (slot for slot in log.read() if isinstance(slot, Manifest))
        (manifest,) = (slot for slot in slots if slot.sequence == outcome.sequence)
        everything = await player.peek({rollout: KnownCall(0) for rollout, _turn in player.sampled()})
        results.append(added(manifest, earlier, number * tokens, whole_bytes(everything.calls, layout)))
        earlier |= {file.path for file in manifest.files}
    training.cancel()
    await controller.close("done")
    with suppress(asyncio.CancelledError, Exception):
        await training
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100, help="of each call from one snapshot to the next")
    arguments = parser.parse_args()
    config = RunConfig.model_validate(
        {
            "name": "bytes",
            "algorithm": {"num_prompts_per_step": GROUPS, "num_generations_per_prompt": SIBLINGS},
            "async_rl": {"max_lookahead_versions": 0},
            "generation": {"max_new_tokens": 1_000_000, "max_model_len": 2_000_000},
            "rollout_recovery": {"target_level": "prefix", "peek_interval_s": 1e6},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(grow(config, folder, snapshots=arguments.snapshots, tokens=arguments.tokens))
    new = CALLS * arguments.tokens
    shown = [one for number, one in enumerate(results, 1) if number in (1, 2, 5, 10, 20, 31, 32, len(results))]
    columns = ["tokens of each call", "KiB of rows", "per new token, bytes", "KiB of all else", "all anew, KiB", "x"]
    show(
        f"What {len(results)} snapshots of {CALLS} running calls write, {new:,} tokens after one another",
        columns,
        [row_of(f"{one.tokens}", [one], new) for one in shown] + [row_of("all snapshots", results, new * len(results))],
    )


def row_of(name: str, some: list[Added], new: int) -> list[str]:
    """Sums over snapshots."""
    rows, others, whole = (sum(getattr(one, field) for one in some) for field in ("rows", "others", "whole"))
    sizes = [f"{rows / 1024:,.0f}", f"{rows / new:.1f}", f"{others / 1024:,.0f}", f"{whole / 1024:,.0f}"]
    return [name, *sizes, f"{whole / rows:.1f}" if rows else ""]


if __name__ == "__main__":
    main()
