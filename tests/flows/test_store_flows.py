"""The flows `verify` and `prune` with Prefect's engine: forms, names of flow runs, tables, and what fails a run."""

import os
import shutil
import time
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ParameterTypeError

from flows.prune import prune
from flows.verify import verify
from storage.errors import ConfigurationError, NotFound, RunAlreadyLive, SnapshotCorrupt

STORE = Path(__file__).resolve().parents[1] / "storage/formats/trained-run"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Run `demo`, silent for a day, in the store of this home."""
    monkeypatch.setenv("MIDFLIGHT_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = tmp_path / "store"
    shutil.copytree(STORE, folder)
    a_day_ago = time.time() - 86_400
    for path in folder.rglob("*"):
        os.utime(path, (a_day_ago, a_day_ago))
    return folder


@pytest.mark.parametrize("flow", [verify, prune], ids=lambda flow: flow.name)
def test_every_parameter_of_the_form_has_a_description_and_a_default(flow):
    properties = flow.parameters.properties
    assert list(properties)[:2] == ["run", "store_url"]
    for name, field in properties.items():
        assert field["description"].endswith("."), name
        assert "default" in field
    assert "pattern" in str(properties["run"])


async def _newest_run():
    async with get_client() as client:
        (run,) = await client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)
        return run


async def _table(key):
    async with get_client() as client:
        found = await client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
        newest = max(found, key=lambda artifact: artifact.created)
        return newest.data


@pytest.mark.system
@pytest.mark.usefixtures("prefect_api")
async def test_a_store_is_verified_with_a_drill_and_named_after_it(store):
    rows = await verify(drill=True)
    assert [(row["run"], row["sequence"], row["problem"], row["drilled"]) for row in rows] == [
        ("demo", 1, "", True),
        ("demo", 2, "", True),
    ]
    assert (await _newest_run()).name == "drill-store"
    assert "as published, and restored" in await _table("verification")


@pytest.mark.system
@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize("flow", [verify, prune], ids=lambda flow: flow.name)
async def test_the_store_of_a_new_home_may_be_empty_and_one_that_was_named_may_not(flow, tmp_path, monkeypatch):
    monkeypatch.setenv("MIDFLIGHT_HOME", str(tmp_path))
    assert await flow() == []
    with pytest.raises(NotFound, match="holds no run at all"):
        await flow(store_url=str(tmp_path / "elsewhere"))


@pytest.mark.system
@pytest.mark.usefixtures("prefect_api")
async def test_a_defect_fails_the_flow_run_and_is_kept_unless_told_otherwise(store):
    part = next((store / "demo/parts").glob("514c*"))
    part.write_bytes(b"?")
    with pytest.raises(SnapshotCorrupt, match=part.name):
        await verify("demo", record=False)
    assert (await _newest_run()).name == "verify-demo"
    assert not (store / "demo/verifications").exists()
    with pytest.raises(SnapshotCorrupt):
        await verify()
    assert len(list((store / "demo/verifications").iterdir())) == 2
    with pytest.raises(NotFound):
        await verify("nobody")
    with pytest.raises(ParameterTypeError):
        await verify("../store")


@pytest.mark.system
@pytest.mark.usefixtures("prefect_api")
async def test_pruning_is_a_dry_run_unless_told_otherwise_and_leaves_live_runs_alone(store):
    debris = store / "demo/parts" / f"{'0' * 64}.parquet"
    debris.write_bytes(b"debris")
    os.utime(debris, (0, 0))
    (plan,) = await prune()
    assert ([file["path"] for file in plan["files"]], plan["done"]) == ([f"demo/parts/{debris.name}"], None)
    assert (await _newest_run()).name == "prune-store-dry-run"
    assert debris.exists()
    live = store / "demo/trace/incarnation-1.jsonl"
    os.utime(live)
    (left,) = await prune(apply=True)
    assert "its controller may be live" in left["left_alone"]
    assert "may be live" in await _table("retention")
    with pytest.raises(RunAlreadyLive):
        await prune("demo", apply=True)
    assert debris.exists()
    os.utime(live, (0, 0))
    (done,) = await prune("demo", apply=True)
    assert (await _newest_run()).name == "prune-demo"
    assert (done["done"]["deleted"], debris.exists()) == ((f"demo/parts/{debris.name}",), False)
    with pytest.raises(ConfigurationError, match="take_over"):
        await prune(take_over=True)
