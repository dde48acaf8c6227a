"""The table of a restore in Prefect's UI: the plan before, and what came of it when all that was launched is done."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.runtime import flow_run

from storage.manifests import Manifest
from storage.run_config import RunConfig
from tasks.reports import REFRESH_S
from tasks.restore_artifact import RestoreOutcome, plan_restore

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("prefect_api")]

STORE = Path(__file__).resolve().parents[1] / "storage/formats/trained-run"
RERUN = "siblings, run from their start"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Run `demo` with checkpoint 1 and snapshot 2."""
    shutil.copytree(STORE, tmp_path / "store")
    return RunConfig.model_validate({"name": "demo", "store": {"url": str(tmp_path / "store")}})


async def _tables() -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Description and lines of each table of this flow run, oldest first."""
    async with get_client() as client:
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        found = sorted(await client.read_artifacts(artifact_filter=mine), key=lambda artifact: artifact.created)
    assert {artifact.key for artifact in found} == {"restore-plan-demo"}
    lines = [json.loads(str(artifact.data)) for artifact in found]
    rows = [{row["what"]: (row["planned"], row["actual"]) for row in table} for table in lines]
    return [(str(artifact.description), table) for artifact, table in zip(found, rows, strict=True)]


async def test_the_plan_is_there_before_the_links_and_the_outcome_beside_it_once_it_is_known(
    config: RunConfig, restored_again: Callable[[Path], Manifest]
) -> None:
    now = 0.0

    @flow(name="restore-plan-under-test")
    async def under_test() -> list[tuple[str, dict[str, tuple[str, str]]]]:
        nonlocal now
        planned = await plan_restore(config, {"target": 2, "anchor": 1})
        assert planned["siblings_rerun"] == 7
        restored_again(Path(config.store.url))
        outcome = RestoreOutcome(config, clock=lambda: now)
        await outcome.refresh()
        assert outcome.is_over
        now += 10 * REFRESH_S
        await outcome.refresh()
        return await _tables()

    (before, plan), (after, both) = await under_test()
    assert before == "Before the restore of bundle 00000002"
    assert plan[RERUN] == ("7", "")
    assert after == "The restore of bundle 00000002 and what it came to"
    assert both[RERUN] == ("7", "1")


async def test_a_fresh_start_has_no_plan_and_a_run_that_restored_nothing_no_outcome(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"name": "new", "store": {"url": str(tmp_path)}})

    @flow(name="fresh-start-under-test")
    async def under_test() -> bool:
        assert await plan_restore(config, {"target": None, "anchor": None}) == {}
        outcome = RestoreOutcome(config)
        await outcome.refresh()
        return outcome.is_over

    assert await under_test()


async def test_a_damaged_trace_takes_the_plan_away_and_no_restore(config: RunConfig) -> None:
    (trace,) = (Path(config.store.url) / "demo" / "trace").glob("*.jsonl")
    first, _, rest = trace.read_text().partition("\n")
    trace.write_text(f"{first}\nno event\n{rest}")

    @flow(name="plan-of-a-damaged-trace-under-test")
    async def under_test() -> dict[str, Any]:
        return await plan_restore(config, {"target": 2, "anchor": 1})

    assert await under_test() == {}
