"""Saved formats are frozen by version: a changed field needs a new version, and older ones stay readable.

`formats/fields.json` holds names and types of every version ever released. Add a version there, or a new kind of rows,
whose first version this is; never change what is there.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage.catalog import select
from storage.errors import FormatUnsupported, SnapshotCorrupt
from storage.filesystem import Store, open_store
from storage.forking import fork
from storage.layout import RunLayout
from storage.manifests import FORMAT_VERSION, Manifest, read_log
from storage.records import CallSampling, Progress
from storage.run_record import RECORD_FIELDS, read_run_record
from storage.schemas import ROW_SCHEMA_VERSION, ROW_SCHEMAS
from storage.snapshot_reader import read_bundle, verify_model_files
from storage.state_schemas import SCHEMAS_BY_VERSION, STATE_SCHEMA_VERSION
from storage.trace_reader import read_events
from storage.verdicts import VERDICT_VERSION, Verdict

FORMATS = Path(__file__).parent / "formats"
FROZEN: dict[str, dict[str, Any]] = json.loads((FORMATS / "fields.json").read_text())
DEMO = RunLayout("demo")


def _table(schema: pa.Schema) -> list[list[Any]]:
    return [[field.name, str(field.type), field.nullable] for field in schema]


def _bare(schema: Any) -> Any:
    """A JSON schema without the words for people."""
    if isinstance(schema, dict):
        named = "properties", "$defs"
        return {
            key: {name: _bare(inner) for name, inner in value.items()} if key in named else _bare(value)
            for key, value in schema.items()
            if key not in ("title", "description")
        }
    return [_bare(item) for item in schema] if isinstance(schema, list) else schema


def current_formats() -> dict[str, dict[str, Any]]:
    """What this code writes, as `fields.json` has it."""
    progress = {field.name: str(field.type) for field in dataclasses.fields(Progress)}
    state = {
        str(version): {kind: _table(schema) for kind, schema in schemas.items()} | {"progress": progress}
        for version, schemas in SCHEMAS_BY_VERSION.items()
    }
    return {
        "rows": {str(ROW_SCHEMA_VERSION): {kind.value: _table(schema) for kind, schema in ROW_SCHEMAS.items()}},
        "state": state,
        "manifest": {str(FORMAT_VERSION): _bare(Manifest.model_json_schema())},
        "verification": {str(VERDICT_VERSION): _bare(Verdict.model_json_schema())},
        "run.json": {str(version): sorted(fields) for version, fields in RECORD_FIELDS.items()},
    }


@pytest.mark.parametrize("name", ["rows", "state", "manifest", "run.json", "verification"])
def test_the_fields_of_a_version_never_change(name: str) -> None:
    for version, fields in current_formats()[name].items():
        assert version in FROZEN[name], f"add version {version} of {name} to formats/fields.json, and a fixture of it"
        assert fields == FROZEN[name][version], f"{name} changed: raise its version and keep reading version {version}"


@pytest.fixture
def version_1(tmp_path: Path) -> Store:
    """The store that the first format wrote."""
    shutil.copytree(FORMATS / "version-1", tmp_path / "store")
    return open_store(str(tmp_path / "store"))


def test_a_store_of_version_1_is_read_whole(version_1: Store) -> None:
    claim, checkpoint, snapshot = read_log(version_1, DEMO)
    assert isinstance(claim, Manifest)
    assert isinstance(checkpoint, Manifest)
    assert isinstance(snapshot, Manifest)
    chosen = select(version_1, DEMO)
    assert (chosen.target, chosen.anchor, chosen.passed_over) == (snapshot, checkpoint, ())
    assert verify_model_files(version_1, checkpoint) == 351
    state = read_bundle(version_1, DEMO, snapshot).state
    assert [g.group_id for g in (*state.buffer, *state.ledger)] == ["e0-p5", "e0-p6", "e0-p7", "e0-p8"]
    assert [t.group.group_id for t in state.trained] == ["e0-p4"]
    assert (state.spares[0].group_id, state.dropped[0].prompt.group_id) == ("e0-p9", "e0-p10")
    assert state.progress.shortfall == {2: 1}
    assert (state.progress.train_steps, state.model_step) == (2, 1)
    assert len(read_bundle(version_1, DEMO, checkpoint).rows) == 4
    assert read_run_record(version_1, DEMO).name == "demo"
    assert read_run_record(version_1, DEMO).forked_from is None
    assert [e["step"] for e in read_events(version_1, DEMO) if e["event"] == "train_step"] == [1, 2]


def test_a_store_of_version_2_is_read_whole_with_its_episodes(tmp_path: Path) -> None:
    shutil.copytree(FORMATS / "version-2", tmp_path / "store")
    store = open_store(str(tmp_path / "store"))
    chosen = select(store, DEMO)
    assert chosen.target is not None
    state = read_bundle(store, DEMO, chosen.target).state
    (episode,) = state.episodes
    assert (episode.row_key, episode.turn, len(episode.calls)) == ("e0-p11_g0-a1", 2, 2)
    assert [sibling.resumes for sibling in state.ledger[-1].siblings] == [1, 0]
    assert chosen.target.counts["finished_turns"] == 2


def test_a_store_of_version_3_is_read_whole_with_its_partial_calls(tmp_path: Path) -> None:
    shutil.copytree(FORMATS / "version-3", tmp_path / "store")
    store = open_store(str(tmp_path / "store"))
    chosen = select(store, DEMO)
    assert chosen.target is not None
    bundle = read_bundle(store, DEMO, chosen.target)
    (call,) = bundle.state.partial_calls
    assert (call.key, call.num_tokens, call.prompt_tokens) == ("e0-p12_g1/a0/t0", 5, 2)
    assert call.sampling == CallSampling("counter", 2**63 - 2, 0.7, 1.0, (0, 2))
    rows = [bundle.rows[chunk] for chunk in call.chunks]
    tokens = [row.batch.column("token_ids")[row.index].as_py() for row in rows]
    assert tokens == [[100, 101, 102], [103, 104]]
    assert [row.batch.column("versions")[row.index].as_py() for row in rows] == [[3], [4]]
    assert [entry.kind for entry in chosen.target.files if entry.role == "part"][-1] == "partial_tokens"
    assert chosen.target.counts["partial_tokens"] == 5


@pytest.mark.parametrize("version", [1, 2])
def test_what_an_older_version_held_is_written_again_with_the_same_meaning(tmp_path: Path, version: int) -> None:
    """As a fork or the first snapshot after an upgrade does."""
    shutil.copytree(FORMATS / f"version-{version}", tmp_path / "store")
    store = open_store(str(tmp_path / "store"))
    source = select(store, DEMO).target
    assert source is not None
    old = read_bundle(store, DEMO, source)
    new = read_bundle(store, RunLayout("again"), fork(store, DEMO, source.sequence, "again").target)
    assert (new.state, new.rows) == (old.state, old.rows)
    assert {entry.schema_version for entry in source.files if entry.role == "state"} == {version}
    assert {entry.schema_version for entry in new.manifest.files if entry.role == "state"} == {STATE_SCHEMA_VERSION}
    assert new.state.partial_calls == ()


def test_a_bundle_of_a_later_version_is_refused_by_name_before_anything_of_it_is_read(version_1: Store) -> None:
    *_, snapshot = read_log(version_1, DEMO)
    assert isinstance(snapshot, Manifest)
    later = STATE_SCHEMA_VERSION + 1
    files = tuple(
        e.model_copy(update={"schema_version": later, "path": f"{e.path}.gone"}) if e.role == "state" else e
        for e in snapshot.files
    )
    with pytest.raises(FormatUnsupported, match=rf"schema version {later}, this Midflight reads \[1, 2, 3\]"):
        read_bundle(version_1, DEMO, snapshot.model_copy(update={"files": files}))


def test_state_tables_of_two_versions_in_one_bundle_are_refused(version_1: Store) -> None:
    *_, snapshot = read_log(version_1, DEMO)
    assert isinstance(snapshot, Manifest)
    first = next(entry for entry in snapshot.files if entry.role == "state")
    files = [e.model_copy(update={"schema_version": 2}) if e is first else e for e in snapshot.files]
    with pytest.raises(SnapshotCorrupt, match=r"mixes state files of the schema versions \[1, 2\]"):
        read_bundle(version_1, DEMO, snapshot.model_copy(update={"files": tuple(files)}))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"format_version": 3}, FormatUnsupported, r"run\.json: format_version is 3, this Midflight reads \[1, 2\]"),
        ({"format_version": "1"}, FormatUnsupported, "format_version is '1'"),
        ({"novelty": 1}, FormatUnsupported, r"run\.json: unknown fields \['novelty'\]"),
        ({"forked_from": {}}, FormatUnsupported, r"unknown fields \['forked_from'\]"),
        ({"name": "other"}, SnapshotCorrupt, "is the record of run 'other', it was copied here"),
    ],
)
def test_another_version_or_an_unknown_field_of_a_run_record_is_refused_by_name(
    version_1: Store, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    body = json.loads(version_1.read(DEMO.run_json))
    version_1.write(DEMO.run_json, json.dumps({**body, **change}).encode())
    with pytest.raises(error, match=says):
        read_run_record(version_1, DEMO)
