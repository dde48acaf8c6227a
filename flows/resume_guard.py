"""Deployment `resume-guard`: starts a crashed `train` flow run again, by itself.

Automations of prefect.yaml start it when a `train` flow run crashed, and when one has sent no heartbeat for long. It
waits until the state has settled, leaves alone what a person cancelled, and gives up after `cluster.max_resumes`
resumes in a row that published nothing new. The resumed flow run is the same one: it finds its living runtime, or
restores.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import AwaitingRetry, Completed, Crashed
from pydantic import ValidationError

from flows.config_files import resolved
from flows.driver import Driver
from flows.home import Home
from storage.catalog import live_bundles
from storage.errors import MidflightError
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import read_log
from storage.run_config import RunConfig
from tasks.ray_runtime import RayRuntime

RESUME_GUARD = "resume-guard/resume-guard"
SETTLED_S = 2.0
POLL_S = 0.5
# Before the n-th resume in a row that may be in vain: what is down needs time.
BACKOFF_S = (0.0, 10.0, 60.0)
_IN_VAIN, _NEWEST = "midflight.resumes-in-vain", "midflight.newest-bundle"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a flow run that stopped. `labels` are kept on it for the next time."""

    resume: bool
    reason: str
    delay_s: float = 0.0
    labels: dict[str, int] | None = None


@flow(name="resume-guard", flow_run_name="resume-guard-{flow_run_id}", persist_result=False)
async def resume_guard(flow_run_id: UUID, silent: bool = False) -> State[Any]:
    """Start a `train` flow run again if it crashed. Automations call this.

    Args:
        flow_run_id: The flow run.
        silent: It sent no heartbeat for a while, and nothing else is known.
    """
    async with get_client() as client:
        run = await _settled(client, flow_run_id)
        config = _config_of(run)
        if config is None or run.deployment_id is None:  # somebody else's flow of this name, or one without a worker
            return Completed(name="Ignored", message=f"{run.name} is no run of the deployment `train`")
        if silent:
            run = await _declared_crashed(client, run, config)
        history = await client.read_flow_run_states(flow_run_id)
        newest = await asyncio.to_thread(newest_bundle, config)
        verdict = judge(run, history, newest, max_resumes=config.cluster.max_resumes)
        get_run_logger().info("%s: %s", run.name, verdict.reason)
        if not verdict.resume:
            return Completed(name="Ignored", message=verdict.reason)
        now = await client.read_flow_run(run.id)
        if now.state is None or run.state is None or now.state.id != run.state.id:
            return Completed(name="Ignored", message=f"it went on meanwhile and is {now.state_name}")
        await client.update_flow_run_labels(run.id, dict(verdict.labels or {}))
        due = datetime.now(UTC) + timedelta(seconds=verdict.delay_s)
        await client.set_flow_run_state(run.id, AwaitingRetry(scheduled_time=due, message=verdict.reason), force=True)
        return Completed(message=verdict.reason)


def judge(run: FlowRun, history: Sequence[State[Any]], newest: int, *, max_resumes: int) -> Verdict:
    """Whether to resume. `newest`: sequence of the newest bundle, -1 if there is none or the store does not answer."""
    if run.state is None or run.state.type != StateType.CRASHED:
        return Verdict(False, f"it is {run.state_name or 'without a state'}, not crashed")
    if _was_cancelled(history):
        return Verdict(False, "a person cancelled it")
    if max_resumes == 0:
        return Verdict(False, "cluster.max_resumes is 0")
    known = int(run.labels.get(_NEWEST, -1))
    in_vain = int(run.labels.get(_IN_VAIN, 0)) if newest <= known else 0
    if in_vain >= max_resumes:
        return Verdict(
            False,
            f"{in_vain} resumes in a row published nothing new (cluster.max_resumes): remove the cause and press Retry",
        )
    delay_s = BACKOFF_S[min(in_vain, len(BACKOFF_S) - 1)]
    reason = f"crashed, resume {in_vain + 1} of {max_resumes} since the newest bundle"
    return Verdict(True, reason, delay_s, {_IN_VAIN: in_vain + 1, _NEWEST: max(newest, known)})


def newest_bundle(config: RunConfig) -> int:
    """Sequence of the newest bundle that was published; -1 if there is none, or the store does not answer."""
    try:
        store = open_store(config.store.url, deadline_s=config.store.deadline_s)
        checkpoints, snapshots = live_bundles(read_log(store, RunLayout(config.name)))
    except MidflightError:
        return -1
    return max((bundle.sequence for bundle in (*checkpoints, *snapshots)), default=-1)


def _was_cancelled(history: Sequence[State[Any]]) -> bool:
    """Whether a cancel came after the newest start."""
    for state in sorted(history, key=lambda state: state.timestamp, reverse=True):
        if state.type in (StateType.CANCELLING, StateType.CANCELLED):
            return True
        if state.type == StateType.RUNNING:
            return False
    return False


async def _settled(client: PrefectClient, flow_run_id: UUID) -> FlowRun:
    """The flow run, once its state has not moved for `SETTLED_S`: a cancel can pass through other states."""
    run = await client.read_flow_run(flow_run_id)
    while run.state is not None and run.state.is_final():
        age_s = (datetime.now(UTC) - run.state.timestamp).total_seconds()
        if age_s >= SETTLED_S:
            break
        await asyncio.sleep(POLL_S)
        run = await client.read_flow_run(flow_run_id)
    return run


async def _declared_crashed(client: PrefectClient, run: FlowRun, config: RunConfig) -> FlowRun:
    """A running flow run without heartbeats has crashed, unless its runtime hears from it. Ray may be gone with it."""
    if run.state is None or not run.state.is_running():
        return run
    try:
        status = await RayRuntime(config.name, cache=Home.current().cache).status()
    except MidflightError:
        status = None
    driver = Driver.parse(status.driver or "") if status is not None else None
    if driver is not None and driver.flow_run == str(run.id):
        return run
    message = "no heartbeat, and its runtime does not hear from it either"
    await client.set_flow_run_state(run.id, Crashed(name="Silent", message=message), force=True)
    return await client.read_flow_run(run.id)


def _config_of(run: FlowRun) -> RunConfig | None:
    try:
        return resolved(RunConfig.model_validate(run.parameters.get("config")))
    except ValidationError:
        return None
