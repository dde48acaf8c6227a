"""A drill restores for real: it finds what comparing files can't."""

import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_workers.controller.restorer import RolloutRestorer
from gpu_workers.environments.tasks import build_task
from storage.errors import ConfigurationError, StoreUnavailable
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.logical_digest import logical_digest
from storage.manifests import Manifest, read_log
from storage.records import RecoveryLevel
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
