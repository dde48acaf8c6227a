"""Selection and refusal: which bundle a run resumes from, and that no defect is ever taken for a fresh start."""

import pyarrow as pa
import pytest

from gpu_workers.controller.restorer import RestorePlan
from storage.canonical import sha256
from storage.catalog import live_bundles, select
from storage.errors import FormatUnsupported, NoRestorableState, SnapshotCorrupt
from storage.layout import RunLayout
from storage.manifests import decode_manifest, encode_manifest, read_log
from storage.parquet import decode_table, encode_table
from storage.state_schemas import STATE_SCHEMAS

LAYOUT = RunLayout("run")


async def _run(make_world, *, snapshots=2, **sections):
    """Step 1 is durable, with so many snapshots after it; groups are buffered and half-finished; the run is dead."""
    world = make_world(**sections)
    world.boot()
    half = set(world.passed_by(40)) - set(world.passed_by(12))
    world.generator.held = lambda group_id, index: index == 1 and group_id in half
    controller = await world.restore(world.plan())
    await controller.train_steps(1, 1)
    await world.settle(lambda: controller.describe()["sealed_siblings"] == 4 and len(controller.parts.buffer) == 4)
    for number in range(snapshots):
        await world.snapshot(number, force=True)
    await world.kill()
    return world


def _manifests(world):
    paths = world.store.list(LAYOUT.manifests)
    manifests = [decode_manifest(world.store.read(path), path) for path in paths]
    return [m for m in manifests if m.kind in ("trainer_checkpoint", "rollout_snapshot")]


def _select(world, **options):
    return select(world.store, LAYOUT, **options)


def _flip(world, entry):
    data = bytearray(world.store.read(entry.path))
    data[len(data) // 2] ^= 4
    world.store.write(entry.path, bytes(data))


async def test_scenario_41_the_newest_valid_snapshot_is_selected_and_a_corrupt_newer_one_is_reported(make_world):
    world = await _run(make_world)
    checkpoint, _, newer = _manifests(world)
    assert (_select(world).target, _select(world).passed_over) == (newer, ())
    forged = _forge(world, newer, "ledger", lambda rows: rows[0].update(order=10_000))
    selection = _select(world)
    assert (selection.target, selection.anchor) == (newer, checkpoint)
    assert [sequence for sequence, _ in selection.passed_over] == [forged.sequence]
    with pytest.raises(NoRestorableState, match=f"(?s)allow_older.*{forged.sequence:08d}: "):
        _select(world, allow_older=False)
    controller = await world.start()
    assert controller.parts.state.train_steps == 1
    await world.kill()


async def test_scenario_41_a_trainer_checkpoint_stands_alone_when_its_snapshots_are_ignored_or_corrupt(make_world):
    world = await _run(make_world)
    checkpoint, *snapshots = _manifests(world)
    assert _select(world, mode="trainer_checkpoint").target == checkpoint
    own = {e.path: e for s in snapshots for e in s.files if e.path not in {c.path for c in checkpoint.files}}
    for entry in own.values():
        _flip(world, entry)
    selection = _select(world)
    assert selection.target == checkpoint
    assert sorted(sequence for sequence, _ in selection.passed_over) == [s.sequence for s in snapshots]
    await world.start()
    await world.train(2, 3)
    await world.kill()


async def test_scenario_41_if_nothing_is_valid_the_error_lists_every_reason_and_no_fresh_run_starts(make_world):
    world = await _run(make_world)
    manifests = _manifests(world)
    for entry in {e.path: e for m in manifests for e in m.files}.values():
        _flip(world, entry)
    with pytest.raises(NoRestorableState) as refused:
        await world.start()
    for manifest in manifests:
        assert f"{manifest.sequence:08d}: " in str(refused.value)
    assert world.controller.state == "empty"


async def test_scenario_41_a_snapshot_whose_anchor_is_another_checkpoint_is_passed_over(make_world):
    world = await _run(make_world)
    checkpoint, _, newer = _manifests(world)
    other = newer.model_copy(update={"anchor": newer.anchor.model_copy(update={"identity": "f" * 64})})
    forged = _append(world, other)
    selection = _select(world)
    assert (selection.target, selection.anchor) == (newer, checkpoint)
    ((sequence, reason),) = selection.passed_over
    assert sequence == forged.sequence
    assert "identity ffffffffffff" in reason


async def test_scenario_35_retention_keeps_k_per_anchor_and_runs_only_after_a_publication(make_world):
    world = make_world(checkpointing={"keep": 1}, rollout_checkpointing={"keep_per_anchor": 2})
    controller = await world.start()
    await controller.train_steps(1, 1)
    for number in range(4):
        await world.snapshot(number, force=True)
    checkpoints, snapshots = live_bundles(read_log(world.store, LAYOUT))
    assert ([m.step for m in checkpoints], len(snapshots)) == ([1], 2)
    assert snapshots == [m for m in _manifests(world) if m.kind == "rollout_snapshot"][-2:]
    needed = {entry.path for manifest in (*checkpoints, *snapshots) for entry in manifest.files}
    stored = {path for folder in ("parts", "state", "checkpoints") for path in world.store.list(f"run/{folder}")}
    assert needed <= stored
    before = world.store.changes()
    assert (await controller.attempt_snapshot(9)).reason == "no_data_plane_mutations"
    assert world.store.changes() == before
    await world.kill()


MUTATIONS = {
    "missing": lambda world, entry: world.store.delete(entry.path),
    "truncated": lambda world, entry: world.store.write(entry.path, world.store.read(entry.path)[:-1]),
    "flipped bit": _flip,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
async def test_scenario_48_a_defect_of_any_file_is_refused_by_name_and_leaves_an_empty_controller(make_world, mutation):
    world = await _run(make_world, snapshots=1)
    checkpoint, snapshot = _manifests(world)
    files = {e.path: e for e in snapshot.files} | {e.path: e for e in checkpoint.files if e.role == "weights"}
    assert len(files) >= 9
    for entry in files.values():
        whole = world.store.read(entry.path)
        MUTATIONS[mutation](world, entry)
        controller = world.boot()
        with pytest.raises(SnapshotCorrupt, match=entry.path):
            await controller.restore(RestorePlan(snapshot.sequence, checkpoint.sequence))
        assert controller.state == "empty"
        assert controller.describe()["ledger_groups"] == controller.describe()["buffered_groups"] == 0
        assert world.generator.orders == []
        world.store.write(entry.path, whole)
    await world.restore(RestorePlan(snapshot.sequence, checkpoint.sequence))
    await world.train(2, 3)
    await world.kill()


FORGERIES = {
    "scenario 6: unknown phase": ("ledger", lambda rows: rows[0].update(phase="launched"), "launched"),
    "scenario 48: duplicate group": ("ledger", lambda rows: rows.append(rows[0]), "has 2 owners: ledger, ledger"),
    "scenario 48: two owners": ("spare_prompts", None, "has 2 owners"),
    "scenario 48: a sibling is missing": ("ledger", lambda rows: rows[0]["siblings"].pop(0), "generation indices"),
    "scenario 48: a count": ("replay_index", lambda rows: rows[0].update(num_tokens=1), "counts are"),
    "scenario 48: a field": ("replay_index", lambda rows: rows[0].update(start_version=9), "logical digest"),
    "scenario 49: rows without index": ("replay_index", lambda rows: rows.pop(), "that the index does not refer to"),
    "scenario 49: index without rows": ("rows", lambda rows: rows.pop(), "rows that are not there"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_scenarios_6_48_49_a_table_that_breaks_a_promise_is_refused_and_nothing_is_launched(make_world, forgery):
    kind, change, named = FORGERIES[forgery]
    world = await _run(make_world, snapshots=1)
    checkpoint, snapshot = _manifests(world)
    if change is None:
        owned = world.bundles.read(snapshot.sequence).state.ledger[0].prompt.prompt_id
        change = lambda rows: rows[0].update(prompt_id=owned)  # noqa: E731
    forged = _forge(world, snapshot, kind, change)
    controller = world.boot()
    with pytest.raises((SnapshotCorrupt, FormatUnsupported), match=named):
        await controller.restore(RestorePlan(forged.sequence, checkpoint.sequence))
    assert controller.state == "empty"
    assert (controller.describe()["ledger_groups"], world.generator.orders) == (0, [])
    await world.restore(RestorePlan(snapshot.sequence, checkpoint.sequence))
    await world.kill()


def _forge(world, manifest, kind, change):
    """A new slot whose manifest is whole, but one of its tables was changed by someone who knew how."""
    entry = next(e for e in manifest.files if e.kind == kind and e.role == "state")
    rows = decode_table(world.store.read(entry.path), STATE_SCHEMAS[kind], entry.path).to_pylist()
    change(rows)
    data = encode_table(pa.Table.from_pylist(rows, schema=STATE_SCHEMAS[kind]), writer="forger")
    digest = sha256(data)
    forged = entry.model_copy(
        update={"path": LAYOUT.state(kind, digest), "bytes": len(data), "sha256": digest, "rows": len(rows)}
    )
    world.store.write(forged.path, data)
    files = tuple(forged if e == entry else e for e in manifest.files)
    return _append(world, manifest.model_copy(update={"files": files}))


def _append(world, manifest):
    sequence = len(world.store.list(LAYOUT.manifests))
    appended = manifest.model_copy(update={"sequence": sequence})
    world.store.create_exclusive(LAYOUT.manifest(sequence), encode_manifest(appended))
    return appended
