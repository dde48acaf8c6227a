"""The command that follows a flow run outlives a Prefect server that is away for a while."""

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Completed, Running

from flows import following
from flows.failures import ServicesFailed
from flows.following import SERVER_AWAY_S, states

RUN = FlowRun(flow_id="12345678-1234-1234-1234-123456789abc", name="train-run", state=Running())
AWAY = httpx.ConnectError("refused")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch):
    monkeypatch.setattr(following, "POLL_S", 0)


class Server:
    """Answers one after the other; each takes 20 seconds of the test's clock."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.now = 0.0
        self.said = []

    async def read(self):
        self.now += 20
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def states(self):
        return states(RUN, self.read, say=self.said.append, clock=lambda: self.now)


def status_error(code):
    return httpx.HTTPStatusError("no", request=httpx.Request("GET", "http://x"), response=httpx.Response(code))


@pytest.mark.parametrize("error", [AWAY, TimeoutError(), status_error(503)])
async def test_a_server_that_comes_back_is_waited_for_and_the_run_shown_as_last_known(error):
    completed = RUN.model_copy(update={"state": Completed()})
    server = Server(RUN, error, error, completed)
    seen = [current async for current in _until_final(server)]
    assert [current.state.name for current in seen] == ["Running", "Running", "Running", "Completed"]
    assert server.said == ["Prefect does not answer; the run goes on without it.", "Prefect answers again."]


async def test_a_server_that_stays_away_ends_the_command_by_saying_so():
    server = Server(RUN, *[AWAY] * 10)
    with pytest.raises(ServicesFailed, match=f"did not answer for {SERVER_AWAY_S:.0f} s .* train-run"):
        [current async for current in _until_final(server)]
    assert server.now <= 20 + SERVER_AWAY_S + 20


async def test_a_refused_question_is_no_absence():
    with pytest.raises(httpx.HTTPStatusError):
        [current async for current in _until_final(Server(status_error(404)))]


async def _until_final(server):
    async for current in server.states():
        yield current
        if current.state.is_final():
            return
