"""A drill restores for real: it finds what comparing files can't."""

import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from gpu_workers.controller.restorer import RolloutRestorer
from gpu_workers.environments.tasks import build_task
from storage.errors import ConfigurationError, StoreUnavailable
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.logical_digest import logical_digest
from storage.manifests import Manifest, read_log
from storage.records import AttemptStatus, CallSampling, PartialCall, RecoveryLevel, RowKind, partial_key, rollout_id
from storage.rows import handles
from storage.run_config import DataConfig
from storage.schemas import PARTIAL_TOKENS, prompt_digest
from storage.snapshot_reader import read_bundle
from storage.verdicts import Verdicts
from tasks.bundle_checks import verify_run
from tasks.restore_drill import Drill

STORE = Path(__file__).resolve().parents[1] / "storage/formats/trained-run"
LAYOUT = RunLayout("demo")


@pytest.fixture
def store(tmp_path):
    shutil.copytree(STORE, tmp_path / "store")
    return open_store(str(tmp_path / "store"))


class LosesAGroup(RolloutRestorer):
    async def _restore_ledger(self, bundle, plan):
        report = await super()._restore_ledger(bundle, plan)
        async with self._parts.barrier.mutation("fault") as mutation:
            self._parts.ledger.load(mutation, self._parts.ledger.groups()[:-1])
        return report


class RunsASealedSiblingAgain(RolloutRestorer):
    async def _restore_ledger(self, bundle, plan):
        group, *others = bundle.state.ledger
        again = replace(group, level=RecoveryLevel.PROMPT_GROUP)
        state = replace(bundle.state, ledger=(again, *others))
        report = await super()._restore_ledger(replace(bundle, state=state), plan)
        async with self._parts.barrier.mutation("fault") as mutation:
            kept = [replace(g, level=RecoveryLevel.SIBLING) for g in self._parts.ledger.groups()]
            self._parts.ledger.load(mutation, kept)
        return report


class InventsASpare(RolloutRestorer):
    async def _restore_spare_prompts(self, bundle, plan):
        report = await super()._restore_spare_prompts(bundle, plan)
        self._parts.state.spares = deque([bundle.state.ledger[0].prompt])
        return report


class ForgetsWhatWasDropped(RolloutRestorer):
    async def _restore_cursor(self, bundle, plan):
        report = await super()._restore_cursor(bundle, plan)
        self._parts.state.dropped = []
        return report


class LosesRows(RolloutRestorer):
    async def _restore_replay_buffer(self, bundle, plan):
        rows = dict(list(bundle.rows.items())[1:])
        return await super()._restore_replay_buffer(replace(bundle, rows=rows), plan)

    async def _restore_ledger(self, bundle, plan):
        rows = dict(list(bundle.rows.items())[1:])
        return await super()._restore_ledger(replace(bundle, rows=rows), plan)


class BreaksDown(RolloutRestorer):
    async def _restore_cursor(self, bundle, plan):
        raise KeyError("cursor")


FAULTS = [
    (LosesAGroup, "ledger differ"),
    (RunsASealedSiblingAgain, "ledger"),
    (InventsASpare, "spares differ"),
    (ForgetsWhatWasDropped, "dropped differ"),
    (LosesRows, "rows"),
    (BreaksDown, "link cursor failed: KeyError: 'cursor'"),
]


@pytest.mark.parametrize(("fault", "says"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_of_a_link_that_no_file_shows_is_found_and_kept(store, fault, says):
    assert not verify_run(store, LAYOUT).bad
    found = verify_run(store, LAYOUT, drill=Drill(restorer=fault)).checks[-1]
    assert (found.drilled, found.problem.startswith("restore drill: "), says in found.problem) == (True, True, True)
    report = verify_run(store, LAYOUT)
    assert "known to be bad since the restore drill of" in report.checks[-1].problem, "files can't refute a drill"
    assert "`midflight verify demo --drill`" in report.checks[-1].problem
    assert not verify_run(store, LAYOUT, drill=Drill()).bad
    assert not verify_run(store, LAYOUT).bad


@pytest.mark.parametrize("level", list(RecoveryLevel))
def test_what_a_restart_changes_on_purpose_is_no_difference(store, level):
    snapshot = read_log(store, LAYOUT)[-1]
    assert isinstance(snapshot, Manifest)
    bundle = read_bundle(store, LAYOUT, snapshot)
    state = replace(bundle.state, ledger=tuple(replace(group, level=level) for group in bundle.state.ledger))
    digest = logical_digest(state, bundle.rows)
    saved = replace(bundle, state=state, manifest=snapshot.model_copy(update={"logical_digest": digest}))
    found = Drill().restore(saved, read_log(store, LAYOUT)[1])
    assert (found.tried, found.problem) == (True, "")


def test_a_drill_changes_nothing_in_the_store(store):
    before = {path: store.read(path) for path in store.list("")}
    verify_run(store, LAYOUT, drill=Drill(), record=False)
    assert {path: store.read(path) for path in store.list("")} == before


def _unknown(_data):
    raise ConfigurationError("data.task is 'ours', which is not registered")


def _changed(data):
    return build_task(data.model_copy(update={"seed": data.seed + 1}))


@pytest.mark.parametrize(
    ("dataset_of", "says"), [(_unknown, "'ours', which is not registered"), (_changed, "content hash")]
)
def test_a_bundle_that_cannot_be_restored_here_fails_the_drill_and_is_not_called_bad(store, dataset_of, says):
    report = verify_run(store, LAYOUT, drill=Drill(dataset_of))
    assert all("it can't be restored here" in check.problem and says in check.problem for check in report.checks)
    verdicts = Verdicts(store, LAYOUT)
    assert [verdicts.of(slot) for slot in read_log(store, LAYOUT)[1:]] == [None, None]


class StoreGone(RolloutRestorer):
    async def _restore_weights(self, bundle, plan):
        raise StoreUnavailable("read: no answer")


def test_a_store_that_fails_during_a_drill_is_no_verdict(store):
    with pytest.raises(StoreUnavailable):
        verify_run(store, LAYOUT, drill=Drill(restorer=StoreGone))
    assert store.list(LAYOUT.verifications) == []


def _with_partial_call(store, *, level=RecoveryLevel.PREFIX, **changes):
    """The snapshot as it would be at level `prefix`, with a running sibling in the middle of its response."""
    _, checkpoint, snapshot = read_log(store, LAYOUT)
    bundle = read_bundle(store, LAYOUT, snapshot)
    ledger = tuple(replace(group, level=level) for group in bundle.state.ledger)
    running = [(g, s) for g in ledger for s in g.siblings if s.status is AttemptStatus.DISPATCHED]
    group, sibling = running[0]
    prompt, _ = build_task(DataConfig.model_validate(snapshot.config["data"])).prompt(group.prompt.prompt_id)
    rollout = rollout_id(group.group_id, sibling.generation_index)
    call = PartialCall(
        rollout_id=rollout,
        attempt=sibling.attempt,
        turn=0,
        prompt_tokens=len(prompt),
        prompt_digest=prompt_digest(prompt),
        sampling=CallSampling("counter", 7, 1.0, 1.0, (1,)),
        chunks=tuple(partial_key(f"{rollout}/a{sibling.attempt}/t0", start=s, end=s + 2) for s in (0, 2)),
        num_tokens=4,
    )
    state = replace(bundle.state, ledger=ledger, partial_calls=(replace(call, **changes),))
    rows = {**bundle.rows, **_chunks(group.group_id, call)}
    manifest = snapshot.model_copy(update={"logical_digest": logical_digest(state, rows)})
    return replace(bundle, state=state, rows=rows, manifest=manifest), checkpoint


def _chunks(group_id, call):
    rows = [
        {
            **{"row_id": chunk, "rollout_id": call.rollout_id, "group_id": group_id, "attempt": call.attempt},
            **{"turn": 0, "start": 2 * place, "token_ids": [3, 4], "logprobs": [-1.0, -2.0]},
            **{"version_starts": [0], "versions": [0], "digest": f"digest of {chunk}"},
        }
        for place, chunk in enumerate(call.chunks)
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=PARTIAL_TOKENS)
    return {row.row_id: row for row in handles(RowKind.PARTIAL_TOKENS, batch)}


def test_a_sibling_in_the_middle_of_its_response_is_restored_with_its_tokens(store):
    found = Drill().restore(*_with_partial_call(store))
    assert (found.tried, found.problem) == (True, "")


class ForgetsACall(RolloutRestorer):
    async def _load_ledger(self, bundle, resumed):
        return await super()._load_ledger(replace(bundle, state=replace(bundle.state, partial_calls=())), resumed)


class LosesTheLastChunk(RolloutRestorer):
    async def _load_ledger(self, bundle, resumed):
        (call,) = bundle.state.partial_calls
        shorter = replace(call, chunks=call.chunks[:1], num_tokens=2)
        return await super()._load_ledger(
            replace(bundle, state=replace(bundle.state, partial_calls=(shorter,))), resumed
        )


class MissesAChunk(RolloutRestorer):
    async def _load_ledger(self, bundle, resumed):
        (call,) = bundle.state.partial_calls
        rows = {row_id: row for row_id, row in bundle.rows.items() if row_id != call.chunks[-1]}
        return await super()._load_ledger(replace(bundle, rows=rows), resumed)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (ForgetsACall, "partial_calls, rows differ"),
        (LosesTheLastChunk, "partial_calls, rows differ"),
        (MissesAChunk, "link ledger failed: KeyError: 'e0-"),
    ],
)
def test_a_restore_that_loses_tokens_of_a_running_call_fails_the_drill(store, fault, says):
    bundle, checkpoint = _with_partial_call(store)
    found = Drill(restorer=fault).restore(bundle, checkpoint)
    assert (found.tried, says in found.problem) == (True, True), found.problem


@pytest.mark.parametrize("changes", [{"prompt_digest": "0" * 64}, {"prompt_tokens": 99}])
def test_a_call_that_was_asked_with_something_else_than_its_prompt_fails_the_drill(store, changes):
    bundle, checkpoint = _with_partial_call(store, **changes)
    found = Drill().restore(bundle, checkpoint)
    assert found.tried
    assert f"partial call {bundle.state.partial_calls[0].key} was asked with" in found.problem
