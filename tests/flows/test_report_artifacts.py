"""The artifacts of a training run, and what Prefect keeps of its tasks, on a real API: bounded, however long it is."""

import json
import shutil
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from flows.report import report as report_flow
from tasks.reports import LAST_STEPS, TrainingReport
from tasks.results import forget_results
from tasks.training import train_steps

STORE = Path(__file__).resolve().parents[1] / "storage/formats/trained-run"

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("prefect_api")]


def step_report(step):
    return {"step": step, "rewards_mean": 0.5, "batch_age": 1.0, "seconds": 2.0}


async def artifacts_of(run):
    """Every version of every artifact of a flow run, as (key, data)."""
    async with get_client() as client:
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
        return [(artifact.key, artifact.data) for artifact in await client.read_artifacts(artifact_filter=mine)]


async def reported(steps, *, refresh_s, finish):
    """What a flow's artifacts are after so many steps, one at a time."""

    @flow(name="report-under-test")
    async def under_test():
        report = TrainingReport("run", max_steps=100, refresh_s=refresh_s)
        for step in range(1, steps + 1):
            await report.add([step_report(step)])
        if finish:
            await report.finish()
        return await artifacts_of(flow_run.id)

    return await under_test()


def shown_steps(artifacts):
    return [row["step"] for row in json.loads(dict(artifacts)["last-steps-run"])]


async def test_artifacts_that_are_refreshed_again_and_again_stay_one_row_each():
    artifacts = await reported(30, refresh_s=0.0, finish=False)
    assert sorted(key for key, _ in artifacts) == ["last-steps-run", "reward-curve-run", "train-progress-run"]
    assert shown_steps(artifacts) == list(range(31 - LAST_STEPS, 31))
    assert dict(artifacts)["train-progress-run"] == 30


async def test_artifacts_are_not_refreshed_before_they_are_due():
    assert shown_steps(await reported(5, refresh_s=3600, finish=False)) == [1]


async def test_the_end_of_a_run_shows_what_was_not_due():
    assert shown_steps(await reported(5, refresh_s=3600, finish=True)) == [1, 2, 3, 4, 5]


async def test_a_flow_keeps_nothing_of_the_results_it_forgot(fake_runtime):
    @flow(name="forgets-under-test")
    async def under_test():
        context = FlowRunContext.get()
        await train_steps(fake_runtime, 1, 5, "inc")
        kept = len(context.run_results)
        forget_results()
        return kept, len(context.run_results)

    kept, after = await under_test()
    assert kept > 0
    assert after == 0


async def test_the_flow_report_stores_tables_a_text_and_pictures(tmp_path):
    shutil.copytree(STORE, tmp_path / "store")
    state = await report_flow("demo", store_url=str(tmp_path / "store"), return_state=True)
    result = await state.result()
    assert (result["step"], result["stops"]) == (3, 0)
    stored = dict(await artifacts_of(state.state_details.flow_run_id))
    tables = {"report-summary-demo", "report-steps-demo", "report-stages-demo", "report-staleness-demo"}
    assert stored.keys() >= {
        "report-demo",
        "report-curves-demo",
        "report-group-time-demo",
        "report-audit-demo",
        *tables,
    }
    assert stored["report-group-time-demo"].startswith("data:image/png;base64,")
    assert "# Report of `demo`" in stored["report-demo"]
    assert [row["step"] for row in json.loads(stored["report-steps-demo"])] == [1, 2, 3]
