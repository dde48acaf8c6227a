"""What the processes of a run log reaches the log of the flow run that drives it."""

import pytest
from prefect import flow

from tasks.runtime import relay_logs

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("prefect_api")]


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
