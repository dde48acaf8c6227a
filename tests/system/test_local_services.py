"""Local services: sets side by side never meet, and nothing outlives those who need it."""

import os
import signal
from pathlib import Path

import pytest

from flows.processes import ProcessId, kill
from tests.system.prefect_api import PrefectApi

pytestmark = pytest.mark.system

USE_SERVICES = (
    "import sys, time; from pathlib import Path; from flows.home import Home; "
    "from flows.local_services import local_services\n"
    "with local_services(Home(Path(sys.argv[1])), {}):\n"
    "    print('ready', flush=True); time.sleep(600)"
)
EXPECTED = {"prefect-server", "prefect-worker", "ray-head"}


@pytest.fixture
def user_of(new_user):
    """Starts a process that uses a home's services and waits until they are ready."""

    def start(midflight):
        user = new_user(midflight, USE_SERVICES)
        assert user.stdout.readline() == "ready\n", user.stdout.read()
        return user

    return start


def test_two_sets_side_by_side_share_nothing_and_end_with_their_user(new_home, user_of, leftovers_of, wait_until):
    first, second = new_home("first"), new_home("second")
    users = [user_of(first), user_of(second)]
    states = [first.state(), second.state()]
    assert all(set(state.processes) == EXPECTED for state in states)
    assert states[0].prefect_api_url != states[1].prefect_api_url
    assert states[0].ray_address != states[1].ray_address
    pids = [{process["pid"] for process in state.processes.values()} for state in states]
    assert not pids[0] & pids[1]
    users[0].kill()
    users[0].wait()
    wait_until(lambda: not leftovers_of(states[0]), seconds=60)
    assert first.state() is None
    assert not Path(states[0].ray_temp_dir).exists()
    assert second.state() == states[1]
    assert len(leftovers_of(states[1])) >= len(EXPECTED)
    users[1].send_signal(signal.SIGTERM)
    users[1].wait()
    wait_until(lambda: not leftovers_of(states[1]), seconds=60)


def test_services_are_shared_within_a_home_and_end_with_the_last_user(new_home, user_of, leftovers_of, wait_until):
    midflight = new_home()
    users = [user_of(midflight), user_of(midflight)]
    state = midflight.state()
    os.killpg(users[0].pid, signal.SIGKILL)
    users[0].wait()
    third = user_of(midflight)
    assert midflight.state() == state
    for user in (users[1], third):
        user.kill()
        user.wait()
    wait_until(lambda: not leftovers_of(state), seconds=60)


def test_a_killed_supervisor_takes_the_services_along_and_the_next_start_clears_up(
    new_home, user_of, leftovers_of, wait_until
):
    midflight = new_home()
    user = user_of(midflight)
    state = midflight.state()
    assert kill(ProcessId.from_json(state.supervisor))
    services = [ProcessId.from_json(process) for process in state.processes.values()]
    wait_until(lambda: not any(process.is_alive() for process in services), seconds=30)
    user.kill()
    user.wait()
    again = user_of(midflight)
    assert midflight.state().marker != state.marker
    assert leftovers_of(state) == []
    again.kill()
    again.wait()
    wait_until(lambda: midflight.state() is None, seconds=60)


def test_serve_adds_a_worker_and_the_deployments_to_an_existing_server_and_leaves_it_alone(
    new_home, user_of, leftovers_of
):
    existing, here = new_home("existing"), new_home("here")
    user = user_of(existing)
    url = existing.state().prefect_api_url
    serving = here.start("serve", also={"PREFECT_API_URL": url})
    lines = []
    while "Ctrl-C ends" not in "".join(lines[-1:]):
        lines.append(serving.stdout.readline())
        assert lines[-1], "".join(lines)
    assert f"{url.removesuffix('/api')}/deployments" in "".join(lines)
    state = here.state()
    assert set(state.processes) == {"prefect-worker", "ray-head"}
    prefect = PrefectApi(url)
    assert {"train", "restore", "verify", "report", "resume-guard"} <= prefect.deployments()
    assert {"train crashed", "train is silent"} <= prefect.automations()
    serving.send_signal(signal.SIGINT)
    assert here.wait(serving).code == 0
    assert leftovers_of(state) == []
    assert set(existing.state().processes) == EXPECTED
    assert PrefectApi(url).deployments()
    user.kill()
    user.wait()


def test_a_service_that_cannot_start_is_named_with_its_log(new_home, leftovers_of):
    midflight = new_home()
    (midflight.home.root / "prefect").mkdir()
    (midflight.home.root / "prefect" / "prefect.db").mkdir()  # where the server's database should be
    up = midflight.run("up")
    assert up.code == 1
    assert "ServicesFailed" in up.text
    assert "prefect-server.log" in up.text
    assert midflight.state() is None
