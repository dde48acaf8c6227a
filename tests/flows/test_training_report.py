"""The artifacts of a `train` flow run, in a real Prefect server's database."""

import json

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from tasks.reports import LAST_STEPS, REFRESH_S, TrainingReport, artifact_key
from tasks.run_progress import RunProgress
from tasks.runtime import relay_logs

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("prefect_api")]

KEYS = [artifact_key(name, "some_run.1") for name in ("train-progress", "reward-curve", "last-steps")]


def step(number):
    return {"step": number, "rewards_mean": 0.5, "batch_age": 1.5, "seconds": 0.1}


async def stored():
    async with get_client() as client:
        found = await client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=KEYS)))
    return {artifact.key: artifact for artifact in found}, len(found)


async def test_a_run_of_any_length_leaves_three_artifacts_which_show_its_end():
    seconds = 0.0
    report = TrainingReport("some_run.1", max_steps=400, earlier=RunProgress(rewards={1: 0.1}), clock=lambda: seconds)

    @flow(name="reported")
    async def reported():
        nonlocal seconds
        for number in range(2, 101):
            seconds += REFRESH_S / 4
            await report.add([step(number)])
        await report.show()

    await reported()
    artifacts, count = await stored()
    assert count == len(KEYS)
    assert set(artifacts) == set(KEYS)
    progress, curve, steps = (artifacts[key] for key in KEYS)
    assert progress.data == 25.0
    assert str(curve.data).startswith("data:image/svg+xml")
    assert [row["step"] for row in json.loads(steps.data)] == list(range(101 - LAST_STEPS, 101))


async def test_between_two_refreshes_nothing_is_sent():
    report = TrainingReport("quiet", max_steps=10, clock=lambda: 0.0)
    shown = 0

    async def show():
        nonlocal shown
        shown += 1

    report.show = show
    for number in range(1, 6):
        await report.add([step(number)])
    assert shown == 1


async def test_what_the_workers_logged_is_in_the_log_of_the_flow_run(fake_runtime, caplog):
    message = {"t": 1.0, "level": "WARNING", "source": "generator 0", "message": "the engine is slow"}
    fake_runtime.logs = {"records": [message], "lost": 7}

    @flow(name="relayed")
    async def relayed():
        await relay_logs(fake_runtime)

    await relayed()
    texts = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("WARNING", "generator 0: the engine is slow") in texts
    assert any(text.startswith("7 more records") for _, text in texts)
