"""prefect.yaml deploys the flows that the code calls by name."""

import importlib
from types import SimpleNamespace

import prefect
import pytest
import yaml

from flows import deployments
from flows.deployments import PREFECT_FILE, TRAIN
from flows.restore import RESTORE_DEPLOYMENT
from flows.resume_guard import RESUME_GUARD
from flows.service_state import WORK_POOL

DEPLOYMENTS = yaml.safe_load(PREFECT_FILE.read_text())["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_deployment_is_an_async_flow_of_its_name_by_module(deployment):
    module, _, attribute = deployment["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(module), attribute)
    assert isinstance(flow, prefect.Flow)
    assert flow.isasync
    assert flow.name == deployment["name"]
    assert deployment["work_pool"]["name"] == WORK_POOL


def test_the_deployments_that_are_called_exist():
    names = {f"{deployment['name']}/{deployment['name']}" for deployment in DEPLOYMENTS}
    assert {TRAIN, RESTORE_DEPLOYMENT, RESUME_GUARD} <= names
    expected = "train", "restore", "snapshot", "checkpoint", "verify", "prune", "report", "audit", "resume-guard"
    assert names == {f"{name}/{name}" for name in expected}


def test_what_is_scheduled_deletes_nothing_and_never_piles_up():
    scheduled = {deployment["name"]: deployment for deployment in DEPLOYMENTS if "schedules" in deployment}
    assert set(scheduled) == {"verify", "prune"}
    assert all(
        deployment["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW" for deployment in scheduled.values()
    )
    assert "parameters" not in scheduled["prune"], "by default it is a dry run"


def test_the_guard_is_started_by_a_crash_and_by_silence_of_train():
    guard = next(deployment for deployment in DEPLOYMENTS if deployment["name"] == "resume-guard")
    crash, silence = guard["triggers"]
    assert crash["expect"] == ["prefect.flow-run.Crashed"]
    assert silence["posture"] == "Proactive"
    # Heartbeats carry the name of their flow, and only the id of their deployment.
    assert crash["match_related"] == silence["match_related"]
    assert silence["match_related"] == {"prefect.resource.role": "flow", "prefect.resource.name": "train"}
    train = next(deployment for deployment in DEPLOYMENTS if deployment["name"] == "train")
    heartbeat_s = int(train["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    assert silence["within"] > 3 * heartbeat_s


@pytest.fixture
def deployed(monkeypatch):
    """Counts deployments; `missing` are names that the server has lost."""
    seen = SimpleNamespace(times=0, missing=set())

    async def missing():
        return seen.missing

    def deploy():
        seen.times += 1

    monkeypatch.setattr(deployments, "deploy", deploy)
    monkeypatch.setattr(deployments, "_missing_deployments", missing)
    return seen


def test_what_is_deployed_already_is_not_deployed_again(deployed, tmp_path):
    record = tmp_path / "deployed"
    for _ in range(3):
        deployments.deploy_if_needed(record)
    assert deployed.times == 1


def test_changed_flows_another_server_or_a_lost_deployment_are_deployed_again(deployed, tmp_path, monkeypatch):
    record = tmp_path / "deployed"
    deployments.deploy_if_needed(record)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    deployments.deploy_if_needed(record)
    assert deployed.times == 2
    deployed.missing = {"verify"}
    deployments.deploy_if_needed(record)
    assert deployed.times == 3
    deployed.missing = set()
    changed = tmp_path / "prefect.yaml"
    changed.write_text("deployments: []")
    monkeypatch.setattr(deployments, "PREFECT_FILE", changed)
    deployments.deploy_if_needed(record)
    assert deployed.times == 4
