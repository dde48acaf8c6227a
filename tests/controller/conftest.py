"""Fakes behind the controller's Protocols, and a `World` in which a run is started, killed and started again."""

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from gpu_workers.controller.barrier import Cut, Mutation
from gpu_workers.controller.ports import (
    Failure,
    StepResult,
    WeightsRef,
)
from gpu_workers.controller.prompt_source import PromptSource
from gpu_workers.controller.published_bundles import PublishedBundles
from gpu_workers.controller.restorer import RestorePlan
from gpu_workers.controller.row_assembly import assemble_group
from gpu_workers.controller.single_controller import SingleController
from storage.audit import Audit, account
from storage.catalog import select
from storage.checkpoints import CheckpointFiles
from storage.errors import SnapshotCorrupt
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import FileEntry, ManifestLog
from storage.records import PromptRef, RolloutState, SourcePosition
from storage.run_config import RunConfig
from storage.snapshot_reader import RestoredBundle
from storage.state_checks import defects
from storage.trace_schema import misfits
from tasks.bundle_checks import verify_run
from tasks.restore_drill import Drill
from tests.controller.fake_generator import FakeGenerator

_MEMORY_DISK = "/dev/shm"  # noqa: S108


class FakeTrainer:
    """Its weights are a hash chain over the digests it was trained on, so that equal histories give equal weights."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.weights = "initial"
        self.copies: dict[str, str] = {}
        self.pending: list[str] = []
        self.trained: list[list[str]] = []
        self.finished: dict[int, StepResult] = {}
        self.before_microbatch: Callable[[], None] = lambda: None
        self.before_finish: Callable[[], None] = lambda: None
        self.before_save: Callable[[], None] = lambda: None
        self.microbatch_gate: asyncio.Event | None = None
        self.finish_gate: asyncio.Event | None = None
        self.save_gate: asyncio.Event | None = None
        self.waiting_at = ""

    async def begin_step(self, step: int) -> None:
        self.pending = []

    async def train_microbatch(self, rows: Sequence[pa.RecordBatch]) -> Mapping[str, float]:
        await asyncio.sleep(0)
        await self._wait_at("microbatch", self.microbatch_gate)
        self.before_microbatch()
        for batch in rows:
            self.pending += batch.column("digest").to_pylist()
        return {}

    async def flush_microbatches(self) -> None:
        await asyncio.sleep(0)

    async def finish_step(self, step: int) -> StepResult:
        await asyncio.sleep(0)
        self.before_finish()
        await self._wait_at("finish", self.finish_gate)
        self.weights = hashlib.sha256((self.weights + "".join(self.pending)).encode()).hexdigest()
        self.trained.append(self.pending)
        return StepResult(step, {"loss": 0.0}, self.weights)

    async def publish_weights(self, version: int) -> WeightsRef:
        return WeightsRef(version, f"fake:{self.weights}")

    async def begin_save(self, prefix: str) -> None:
        self.copies[prefix] = self.weights

    async def finish_save(self, prefix: str) -> Sequence[Mapping[str, Any]]:
        await self._wait_at("save", self.save_gate)
        self.before_save()
        entry = CheckpointFiles(self._store, prefix).put("weights.txt", self.copies[prefix].encode(), "weights")
        return [entry.model_dump()]

    async def restore(self, files: Sequence[Mapping[str, Any]] | None) -> None:
        self.weights = "initial"
        for entry in files or ():
            self.weights = CheckpointFiles(self._store, "").fetch(FileEntry(**entry)).decode()

    async def _wait_at(self, place: str, gate: asyncio.Event | None) -> None:
        if gate is not None:
            self.waiting_at = place
            await gate.wait()
            self.waiting_at = ""


class FactTrace:
    """Keeps every event of one incarnation in memory."""

    def __init__(self, run_process: str = "none") -> None:
        self.run_process = run_process
        self.events: list[dict[str, Any]] = []

    def record(self, event: str, **fields: Any) -> None:
        self.events.append({"t": time.time(), "run_process": self.run_process, "event": event, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


@dataclass
class World:
    """One run in one store, and its current incarnation. `kill` ends an incarnation without any goodbye."""

    config: RunConfig
    store: Any  # a `TroubledStore` of tests/conftest.py
    dataset: Any  # a `FakeDataset` of tests/conftest.py
    incarnations: int = 0
    lives: list[tuple[int, FactTrace]] = field(default_factory=list)
    generator: FakeGenerator = field(default_factory=FakeGenerator)
    trace: FactTrace = field(default_factory=FactTrace)
    assemble: Callable[..., Any] = assemble_group
    clock: Callable[[], float] = time.monotonic
    supervised: Callable[[FakeGenerator], Any] = lambda generator: generator
    new_generator: Callable[[], Any] = FakeGenerator

    def change(self, section: str, **values: Any) -> None:
        """Another configuration for the next incarnation."""
        whole = self.config.model_dump()
        self.config = make_config(**{**whole, section: {**whole[section], **values}})

    def boot(self) -> SingleController:
        """A new, empty controller that has claimed the run."""
        self.incarnations += 1
        self.layout = RunLayout(self.config.name)
        log = ManifestLog(self.store, self.layout, f"incarnation-{self.incarnations}")
        log.claim()
        saving = {"checkpointing": self.config.checkpointing, "snapshots": self.config.rollout_checkpointing}
        self.bundles = PublishedBundles(self.store, self.layout, log, **saving)
        self.generator, self.trainer, self.trace = self.new_generator(), FakeTrainer(self.store), FactTrace(log.writer)
        workers = {"generator": self.supervised(self.generator), "trainer": self.trainer}
        workers |= {"assemble": self.assemble, "clock": self.clock}
        workers |= {"environments": self.generator.environments, "incarnation": log.writer}
        parts = {"dataset": self.dataset, "bundles": self.bundles, "trace": self.trace}
        self.controller = SingleController(self.config, **parts, **workers)
        return self.controller

    def plan(self) -> RestorePlan:
        """What selection picks in this store now."""
        saved = self.config.checkpointing
        chosen = select(self.store, RunLayout(self.config.name), mode=saved.restore_mode, allow_older=saved.allow_older)
        return RestorePlan(*(None if m is None else m.sequence for m in (chosen.target, chosen.anchor)))

    async def start(self) -> SingleController:
        """Boot, select, restore and start: what a `train` run does."""
        self.boot()
        return await self.restore(self.plan())

    async def restore(self, plan: RestorePlan) -> SingleController:
        """Restore and start the booted controller."""
        await self.controller.restore(plan)
        self.lives.append((self.controller.parts.state.train_steps, self.trace))
        self.check()
        return self.controller

    async def kill(self) -> None:
        """End the incarnation at once; only the store survives."""
        await self.controller.close("killed")

    async def settle(self, predicate: Callable[[], bool], turns: int = 50_000) -> None:
        """Let the event loop run until `predicate` holds, looking after every turn; fail when it never does."""
        for turn in range(turns):
            if predicate():
                return
            await asyncio.sleep(0 if turn % 10 else 0.0005)
        raise AssertionError("the awaited condition never came true")

    async def train(self, first: int, last: int) -> list[Mapping[str, Any]]:
        """Train steps; the invariants hold before and after each."""
        reports = []
        for step in range(first, last + 1):
            self.check()
            reports += await self.controller.train_steps(step, step)
        self.check()
        return reports

    async def snapshot(self, number: int, *, force: bool = False) -> RestoredBundle:
        """A completed snapshot attempt, read back and checked."""
        outcome = await self.controller.attempt_snapshot(number, force=force)
        assert outcome.outcome == "completed", outcome
        bundle = self.bundles.read(outcome.sequence)
        self.require_whole(bundle.state, set(bundle.rows))
        return bundle

    async def snapshots_while(self, work: asyncio.Task[Any]) -> list[RestoredBundle]:
        """As many snapshots as there is time for, each read back and checked, until `work` is done."""
        bundles, attempts, completed = [], 0, 0
        while not work.done():
            attempts += 1
            outcome = await self.controller.attempt_snapshot(attempts, force=True)
            if outcome.outcome == "skipped":
                await asyncio.sleep(0)  # a skipped attempt has not suspended: the step would never commit
                continue
            completed += 1
            with contextlib.suppress(SnapshotCorrupt):  # a step's checkpoint may have freed it meanwhile
                bundles.append(self.bundles.read(outcome.sequence))
                self.require_whole(bundles[-1].state, set(bundles[-1].rows))
        await work
        assert len(bundles) >= completed / 4
        return bundles

    def check(self) -> None:
        """Invariants I1 to I5 of the live controller."""
        parts, cut = self.controller.parts, Cut("check")
        dropped, spares = tuple(parts.state.dropped), tuple(parts.state.spares)
        ledger, buffer = parts.ledger.capture(cut), parts.buffer.capture(cut)
        trained = parts.state.recorded.capture(cut, after=0)
        calls, tokens = parts.partial_calls.capture(cut, ledger, {})
        state = RolloutState(parts.progress(cut), ledger, buffer, spares, dropped, trained, partial_calls=calls)
        rows = {*parts.rows.capture(cut), *tokens} - set(parts.ledger.staged_keys())
        self.require_whole(state, rows)
        limit = min(len(ledger), self.config.generation.max_inflight_groups)
        assert self.controller.describe()["running_groups"] <= limit  # I5

    def require_whole(self, state: RolloutState, rows: set[str]) -> None:
        """Every passed prompt has one owner (I1, I2), rows are the index (I3), stamps are used up exactly (I4)."""
        assert defects(state) == []
        progress, size = state.progress, self.config.algorithm.num_prompts_per_step
        history = self.history()
        owners = Counter(group for step in range(1, state.model_step + 1) for group in history[step])
        owners.update(trained.group.group_id for trained in state.trained)
        owners.update(group.group_id for group in (*state.ledger, *state.buffer, *state.spares))
        for step in range(state.model_step + 1, progress.train_steps + 1):  # trained again with the same groups
            groups = [trained.group.group_id for trained in state.trained if trained.step == step]
            assert history.get(step, groups) == groups
        owners.update(dropped.prompt.group_id for dropped in state.dropped)
        assert owners == Counter(self.passed(progress.source))
        assert rows == set(state.row_ids())
        if progress.stamps is False:
            assert not progress.shortfall
            assert {g.target_step for g in (*state.ledger, *state.buffer)} <= {None}
            return
        stamps = Counter(g.target_step for g in (*state.ledger, *state.buffer) if g.target_step is not None)
        admitted = range(progress.trainer_version, progress.sampler_cursor + 1)
        assert stamps.keys() <= set(admitted)
        assert all(stamps[s] + progress.shortfall.get(s, 0) == size for s in admitted)

    def committed(self) -> dict[int, dict[str, Any]]:
        """The trace's event of every step that counts: a restore rolls back the steps after the restored one."""
        steps: dict[int, dict[str, Any]] = {}
        for restored, trace in self.lives:
            steps = {step: event for step, event in steps.items() if step <= restored}
            steps.update((event["step"], event) for event in trace.of("train_step"))
        return steps

    def history(self) -> dict[int, list[str]]:
        """Groups of every step that counts."""
        return {step: event["group_ids"] for step, event in self.committed().items()}

    def passed(self, position: SourcePosition) -> list[str]:
        """Group ids of the prompts before a position, in the order of the source."""
        return self.passed_by(position.epoch * len(self.dataset) + position.offset)

    def passed_by(self, count: int) -> list[str]:
        """Group ids of the first prompts of the source."""
        return [prompt.group_id for prompt in self._first(count)]

    def _first(self, count: int) -> list[PromptRef]:
        data = self.config.data
        source = PromptSource(self.dataset, num_epochs=data.num_epochs, seed=data.seed, shuffle=data.shuffle)
        return source.take(Mutation("check"), count)

    def audit(self) -> Audit:
        """The accounting of trace and store, which knows nothing of the live controllers."""
        assert [problem for _, trace in self.lives for event in trace.events for problem in misfits(event)] == []
        for _, trace in self.lives:
            lines = "\n".join(json.dumps(event) for event in trace.events)
            self.store.write(self.layout.trace(trace.run_process), f"{lines}\n".encode())
        assert not verify_run(self.store, self.layout, drill=Drill(lambda _: self.dataset), record=False).bad
        prompts = self._first(len(self.dataset) * self.config.data.num_epochs)
        return account(self.store, self.layout, order=lambda e: [p.prompt_id for p in prompts if p.epoch == e])


def make_config(**sections: Any) -> RunConfig:
    """A small run: 4 prompts x 2 generations, 3 steps, lookahead 1, unless told otherwise."""
    base: dict[str, Any] = {
        "name": "run",
        "algorithm": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_steps": 3},
        "data": {"num_prompts": 40},
        "async_rl": {"retry_backoff_s": 0.001, "retry_backoff_max_s": 0.002},
        "store": {"url": "memory://unused"},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return RunConfig.model_validate(base)


@pytest.fixture
def configure() -> Callable[..., RunConfig]:
    return make_config


@pytest.fixture
def data_failure() -> Failure:
    return Failure(infrastructure=False, message="the answer can't be scored")


@pytest.fixture
def make_world(troubled: Callable[[Store], Any], fake_dataset: Callable[..., Any]) -> Iterator[Callable[..., World]]:
    """Worlds on a local store of their own; in memory where the system has a disk there, since each write is synced."""

    def make(*, dataset: Any = None, **sections: Any) -> World:
        config = make_config(**sections)
        place = tempfile.mkdtemp(dir=folder)
        return World(config, troubled(open_store(place)), dataset or fake_dataset(config.data.num_prompts))

    with tempfile.TemporaryDirectory(dir=_MEMORY_DISK if os.access(_MEMORY_DISK, os.W_OK) else None) as folder:
        yield make
