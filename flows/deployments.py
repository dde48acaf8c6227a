"""Deploys the flows of prefect.yaml, and runs a deployment from the command line."""

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectAlreadyExists
from prefect.states import Cancelling

from flows.failures import DeploymentFailed
from flows.service_state import WORK_POOL
from storage.errors import RunAlreadyLive

PREFECT_FILE = Path(__file__).resolve().parents[1] / "prefect.yaml"
TRAIN = "train/train"
DEPLOY_DEADLINE_S = 180.0
PREFECTS_PREAMBLE = "Flow run encountered an exception: "


def deploy_if_needed(record: Path) -> None:
    """`deploy`, unless `record` says that these very flows were deployed and the server has them still."""
    wanted = fingerprint()
    known = record.read_text() if record.exists() else ""
    if known == wanted and asyncio.run(_missing_deployments()) == set():
        return
    deploy()
    record.write_text(wanted)


def fingerprint() -> str:
    """sha256 of all that deployments are made of: prefect.yaml, the flows, and the models of their parameters."""
    sources = [PREFECT_FILE, *sorted(PREFECT_FILE.parent.glob("flows/*.py"))]
    sources += sorted(PREFECT_FILE.parent.glob("storage/*config*.py"))
    digest = hashlib.sha256(os.environ.get("PREFECT_API_URL", "").encode())
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


async def _missing_deployments() -> set[str]:
    names = {deployment["name"] for deployment in yaml.safe_load(PREFECT_FILE.read_text())["deployments"]}
    async with get_client() as client:
        return names - {deployment.name for deployment in await client.read_deployments()}


def deploy() -> None:
    """Create or update the deployments on the server of PREFECT_API_URL. Doing it again changes nothing."""
    asyncio.run(_ensure_work_pool())
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE)]
    done = subprocess.run(
        command,
        cwd=PREFECT_FILE.parent,
        env={**os.environ, "PREFECT_CLI_PROMPT": "false"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEPLOY_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        lines = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise DeploymentFailed(f"`prefect deploy` failed at {os.environ.get('PREFECT_API_URL')}:\n{lines}")


async def _ensure_work_pool() -> None:
    async with get_client() as client:
        try:
            await client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
        except ObjectAlreadyExists:
            return


async def start_flow_run(deployment: str, parameters: Mapping[str, Any], *, name: str) -> FlowRun:
    """Ask for a run of a deployment (`flow/deployment`) under a name; a worker picks it up."""
    async with get_client() as client:
        found = await client.read_deployment_by_name(deployment)
        return await client.create_flow_run_from_deployment(found.id, parameters=dict(parameters), name=name)


async def refuse_unfinished(name: str) -> None:
    """Raises RunAlreadyLive while a flow run of this name is on its way: it may not hold its runtime yet."""
    unfinished = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
    async with get_client() as client:
        found = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                name=FlowRunFilterName(any_=[name]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=unfinished)),
            )
        )
    if found:
        state = found[0].state_name or "unfinished"
        raise RunAlreadyLive(
            f"flow run {name} ({found[0].id}) is {state}: wait for it, cancel it in the Prefect UI, or take the run "
            "over with --take-over"
        )


async def cancel_flow_run(client: PrefectClient, flow_run_id: UUID) -> None:
    """Ask the worker to end the flow run's process."""
    await client.set_flow_run_state(flow_run_id, Cancelling())


def failure_of(run: FlowRun) -> str:
    """Why a flow run did not complete, without Prefect's preamble."""
    message = (run.state.message if run.state is not None else None) or "no reason was recorded"
    return message.replace(PREFECTS_PREAMBLE, "")


def is_completed(run: FlowRun) -> bool:
    """Whether it ended well."""
    return run.state is not None and run.state.type == StateType.COMPLETED
