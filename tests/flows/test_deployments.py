"""prefect.yaml deploys the flows that the code calls by name."""

import importlib

import prefect
import pytest
import yaml

from flows.deployments import PREFECT_FILE, TRAIN
from flows.service_state import WORK_POOL
from flows.train import RESTORE_DEPLOYMENT

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
    assert {TRAIN, RESTORE_DEPLOYMENT} <= names
    assert names == {"train/train", "restore/restore", "snapshot/snapshot", "checkpoint/checkpoint", "verify/verify"}
