"""Every defect of every file of a bundle is refused, and the message names the file."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from storage.canonical import canonical_json, sha256
from storage.errors import FormatUnsupported, SnapshotCorrupt
from storage.filesystem import Store
from storage.manifests import FileEntry, Manifest
from storage.parquet import decode_table, encode_table
from storage.records import DroppedPrompt, Progress, RolloutState, RowKind, TrainedGroup
from storage.schemas import TRAINING_ROWS
from storage.snapshot_reader import verify_files
from storage.state_schemas import STATE_KINDS, STATE_SCHEMAS

FILES = ("training_rows", "staged_calls", "partial_tokens", *STATE_KINDS)


@pytest.fixture
def store(memory_store: Store) -> Store:
    """What is refused does not depend on the store, and there are many cases."""
    return memory_store


@pytest.fixture
def bundle(run: Any, make: Any) -> Manifest:
    """A snapshot with something in every table."""
    trained, trained_rows = make.buffered(50)
    state, rows = make.state(
        buffered=(1, 2),
        ledger=(3, 4),
        spares=(make.prompt(8),),
        dropped=(DroppedPrompt(make.prompt(5), "data failure", None),),
        trained=(TrainedGroup(0, 0, trained),),
    )
    group, episodes, calls = make.episode_group(9)
    running, partial, chunks = make.prefix_group(10)
    state = replace(state, ledger=(*state.ledger, group, running), episodes=episodes, partial_calls=partial)
    manifest: Manifest = run.writer.write(run.bundle(state, rows | trained_rows | calls | chunks))
    return manifest


def _entry(manifest: Manifest, kind: str) -> FileEntry:
    return next(entry for entry in manifest.files if entry.kind == kind)


def _with_file(manifest: Manifest, kind: str, **changes: Any) -> Manifest:
    files = tuple(entry.model_copy(update=changes) if entry.kind == kind else entry for entry in manifest.files)
    return manifest.model_copy(update={"files": files})


def _rewritten(run: Any, manifest: Manifest, kind: str, data: bytes, **changes: Any) -> Manifest:
    """The bundle with another content of one file, and everything else saying just that content."""
    path = _entry(manifest, kind).path
    run.store.write(f"{path}.changed", data)
    promise = {"path": f"{path}.changed", "bytes": len(data), "sha256": sha256(data)}
    changed = _with_file(manifest, kind, **promise, **changes)
    if kind in STATE_KINDS:
        return changed
    lines = _table(run, manifest, "rows").to_pylist()
    lines = [{**line, "part": f"{path}.changed"} if line["part"] == path else line for line in lines]
    table = pa.Table.from_pylist(lines, schema=STATE_SCHEMAS["rows"])
    return _rewritten(run, changed, "rows", encode_table(table, writer="x"))


def _refused(run: Any, manifest: Manifest, *, says: str, error: type[Exception] = SnapshotCorrupt) -> None:
    with pytest.raises(error, match=says):
        run.read(manifest)


@pytest.mark.parametrize("kind", FILES)
def test_a_flipped_bit_is_refused(run: Any, bundle: Manifest, kind: str) -> None:
    path = _entry(bundle, kind).path
    data = run.store.read(path)
    for place in range(0, len(data), max(1, len(data) // 12)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        run.store.write(path, bytes(flipped))
        _refused(run, bundle, says=f"{path}: manifest says sha256")
        with pytest.raises(SnapshotCorrupt, match=path):
            verify_files(run.store, bundle)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""])
def test_a_truncated_or_longer_file_is_refused(
    run: Any, bundle: Manifest, kind: str, change: Callable[[bytes], bytes]
) -> None:
    path = _entry(bundle, kind).path
    run.store.write(path, change(run.store.read(path)))
    _refused(run, bundle, says=rf"{path}: manifest says \d+ bytes, the store holds \d+")


@pytest.mark.parametrize("kind", FILES)
def test_a_missing_file_is_refused(run: Any, bundle: Manifest, kind: str) -> None:
    run.store.delete(_entry(bundle, kind).path)
    _refused(run, bundle, says=f"{_entry(bundle, kind).path}: missing from store")


@pytest.mark.parametrize("kind", [k for k in FILES if k not in ("staged_calls", "dropped", "spare_prompts")])
def test_a_file_swapped_between_snapshots_is_refused(run: Any, make: Any, bundle: Manifest, kind: str) -> None:
    other_trained, other_rows = make.buffered(60)
    state, rows = make.state(buffered=(2, 11), ledger=(12,), trained=(TrainedGroup(0, 0, other_trained),))
    group, episodes, calls = make.episode_group(13)
    running, partial, chunks = make.prefix_group(14)
    state = replace(state, ledger=(*state.ledger, group, running), episodes=episodes, partial_calls=partial)
    rows |= calls | chunks
    other = run.writer.write(run.bundle(replace(state, progress=Progress(next_order=5)), rows | other_rows))
    foreign = [entry for entry in other.files if entry.kind == kind][-1]
    bytes_of_foreign = run.store.read(foreign.path)
    kept = run.store.read(_entry(bundle, kind).path)
    run.store.write(_entry(bundle, kind).path, bytes_of_foreign)
    _refused(run, bundle, says=_entry(bundle, kind).path)
    run.store.write(_entry(bundle, kind).path, kept)
    files = tuple(foreign if entry.kind == kind else entry for entry in bundle.files)
    _refused(run, bundle.model_copy(update={"files": files}), says="restore from an older one")


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_the_manifest_lists_twice_or_not_at_all_is_refused(run: Any, bundle: Manifest, kind: str) -> None:
    twice = bundle.model_copy(update={"files": (*bundle.files, _entry(bundle, kind))})
    _refused(run, twice, says="listed more than once")
    others = tuple(entry for entry in bundle.files if entry.kind != kind)
    _refused(run, bundle.model_copy(update={"files": others}), says="lists state files|does not list")


def test_an_extra_state_file_or_part_is_refused(run: Any, bundle: Manifest) -> None:
    extra = _entry(bundle, "ledger").model_copy(update={"path": "demo/state/extra", "kind": "novelties"})
    _refused(run, bundle.model_copy(update={"files": (*bundle.files, extra)}), says="lists state files")
    part = _entry(bundle, "training_rows").model_copy(update={"path": "demo/parts/extra.parquet"})
    _refused(run, bundle.model_copy(update={"files": (*bundle.files, part)}), says="parts where no row lies")


@pytest.mark.parametrize("kind", [k for k in FILES if k != "progress"])
def test_another_schema_is_refused(run: Any, bundle: Manifest, kind: str) -> None:
    schema = pa.schema([("row_id", pa.string())])
    data = encode_table(pa.Table.from_pylist([{"row_id": "a"}], schema=schema), writer="x")
    _refused(run, _rewritten(run, bundle, kind, data), says=r"changed: schema (has unknown fields|differs)")
    _refused(run, _rewritten(run, bundle, kind, b"no parquet"), says="not readable as Parquet")


@pytest.mark.parametrize("kind", STATE_SCHEMAS)
def test_an_unknown_field_is_refused(run: Any, bundle: Manifest, kind: str) -> None:
    table = _table(run, bundle, kind)
    wider = table.append_column("novelty", pa.array([1] * table.num_rows))
    changed = _rewritten(run, bundle, kind, encode_table(wider, writer="x"))
    _refused(run, changed, says="unknown fields.*novelty")


@pytest.mark.parametrize("kind", FILES)
def test_another_schema_version_is_refused(run: Any, bundle: Manifest, kind: str) -> None:
    later = _with_file(bundle, kind, schema_version=4)
    _refused(run, later, says="schema version 4", error=FormatUnsupported)


def test_rows_of_a_kind_that_this_version_does_not_know_are_refused(run: Any, bundle: Manifest) -> None:
    known = _entry(bundle, "partial_tokens")
    files = tuple(e.model_copy(update={"kind": "novelties"}) if e is known else e for e in bundle.files)
    later = bundle.model_copy(update={"files": files})
    _refused(run, later, says="rows of unknown kind 'novelties'", error=FormatUnsupported)


@pytest.mark.parametrize("kind", STATE_SCHEMAS)
def test_a_duplicate_entry_is_refused(run: Any, bundle: Manifest, kind: str) -> None:
    table = _table(run, bundle, kind)
    doubled = encode_table(pa.concat_tables([table, table]), writer="x")
    changed = _rewritten(run, bundle, kind, doubled, rows=2 * table.num_rows)
    _refused(run, changed, says=r"has 2 owners|listed \d+ times|listed more than once")


@pytest.mark.parametrize("kind", STATE_SCHEMAS)
def test_a_missing_entry_is_refused(run: Any, bundle: Manifest, kind: str) -> None:
    table = _table(run, bundle, kind).slice(1)
    changed = _rewritten(run, bundle, kind, encode_table(table, writer="x"), rows=table.num_rows)
    _refused(run, changed, says="the index refers to|counts are")


def _table(run: Any, manifest: Manifest, kind: str) -> pa.Table:
    return decode_table(run.store.read(_entry(manifest, kind).path), STATE_SCHEMAS[kind], kind)


@pytest.mark.parametrize("kind", FILES)
def test_a_wrong_row_count_in_the_manifest_is_refused(run: Any, bundle: Manifest, kind: str) -> None:
    _refused(run, _with_file(bundle, kind, rows=99), says="rows")


@pytest.mark.parametrize("name", ["buffered_groups", "ledger_groups", "training_rows", "sealed_siblings"])
def test_a_wrong_count_in_the_manifest_is_refused(run: Any, bundle: Manifest, name: str) -> None:
    counts = {**bundle.counts, name: bundle.counts[name] + 1}
    _refused(run, bundle.model_copy(update={"counts": counts}), says="counts are")


def test_a_wrong_logical_digest_is_refused(run: Any, bundle: Manifest) -> None:
    _refused(run, bundle.model_copy(update={"logical_digest": "0" * 64}), says="logical digest")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"novelty": 1}, "unknown fields"),
        ({"train_steps": None}, "integers"),
        ({"train_steps": True}, "integers"),
        ({"sampler": 3}, "sampler"),
        ({"source": {"epoch": 0}}, "offset"),
        ({"source": {"epoch": 0, "offset": 0, "x": 1}}, "x"),
        ({"shortfall": {"one": 1}}, "one"),
        ({"next_order": 77}, "logical digest"),
    ],
)
def test_changed_counters_are_refused(run: Any, bundle: Manifest, changes: dict[str, Any], says: str) -> None:
    body = json.loads(run.store.read(_entry(bundle, "progress").path))
    body["progress"] |= changes
    _refused(run, _rewritten(run, bundle, "progress", canonical_json(body)), says=says)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("digest", "0" * 64, "has digest"),
        ("offset", 1, "the rows table says"),
        ("offset", -1, "beyond"),
        ("offset", 10_000, "beyond"),
        ("kind", "staged_calls", "the index refers to"),
        ("part", "demo/parts/unlisted.parquet", "does not list"),
        ("row_id", "e0-p99_g0", "the index refers to"),
        ("kind", "partial_tokens", "the index refers to"),
    ],
)
def test_a_wrong_line_of_the_rows_table_is_refused(
    run: Any, bundle: Manifest, column: str, value: Any, says: str
) -> None:
    lines = _table(run, bundle, "rows").to_pylist()
    first = next(line for line in lines if line["offset"] == 0 and line["kind"] == "training_rows")
    first[column] = value
    table = pa.Table.from_pylist(lines, schema=STATE_SCHEMAS["rows"])
    _refused(run, _rewritten(run, bundle, "rows", encode_table(table, writer="x")), says=says)


@pytest.mark.parametrize("column", ["token_ids", "logprobs", "reward", "masked", "digest"])
def test_a_row_whose_content_is_not_what_its_digest_says_is_refused(run: Any, bundle: Manifest, column: str) -> None:
    entry = _entry(bundle, "training_rows")
    rows = decode_table(run.store.read(entry.path), TRAINING_ROWS, entry.path).to_pylist()
    changed = {"token_ids": [9], "logprobs": [0.5], "reward": 9.0, "masked": True, "digest": "0" * 64}
    rows[0][column] = changed[column]
    data = encode_table(pa.Table.from_pylist(rows, schema=TRAINING_ROWS), writer="x")
    _refused(run, _rewritten(run, bundle, "training_rows", data), says="has digest")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout_id": "e0-p10_g0"}, "is of .*e0-p10_g0.*, expected .*e0-p10_g1"),
        ({"group_id": "e0-p9"}, "is of .*'e0-p9'.*, expected .*'e0-p10'"),
        ({"attempt": 1}, "'attempt': 1.*, expected .*'attempt': 0"),
        ({"turn": 1}, "'turn': 1.*, expected .*'turn': 0"),
        ({"start": 2}, "'start': 2.*, expected .*'start': 3"),
        ({"token_ids": [7], "logprobs": [-1.0]}, "its rows hold 4 tokens, its record says 5"),
        ({"logprobs": [-1.0]}, "2 tokens with 1 log-probabilities"),
        ({"version_starts": [1]}, r"2 tokens with weight versions \[4\] from \[1\] on"),
        ({"version_starts": [0, 0], "versions": [3, 4]}, r"from \[0, 0\] on"),
        ({"version_starts": [0, 2], "versions": [3, 4]}, r"from \[0, 2\] on"),
        ({"version_starts": [], "versions": []}, r"weight versions \[\] from \[\] on"),
        ({"versions": [3, 4]}, r"weight versions \[3, 4\] from \[0\] on"),
        ({"versions": [-1]}, r"2 tokens with weight versions \[-1\] from \[0\] on"),
        ({"token_ids": [7, -7]}, "it holds token -7"),
    ],
)
def test_a_row_that_is_not_of_its_partial_call_is_refused(
    run: Any, make: Any, changes: dict[str, Any], says: str
) -> None:
    """However well its digest fits."""
    group, (call,), rows = make.prefix_group(10)
    last = call.chunks[-1]
    plain = rows[last].batch.slice(rows[last].index, 1).to_pylist()[0]
    rows[last] = make.row(RowKind.PARTIAL_TOKENS, {**plain, **changes})
    state = RolloutState(Progress(), ledger=(group,), partial_calls=(call,))
    manifest = run.writer.write(run.bundle(state, rows))
    _refused(run, manifest, says=f"partial call {call.key}: .*{says}")


def test_a_claim_is_no_bundle(run: Any) -> None:
    with pytest.raises(SnapshotCorrupt, match="is a claim"):
        run.read(run.log.read()[0])
