"""Deployment `restore`: one task per link, from choosing a bundle to dispatching the unfinished work.

    select -> verify -> plan -> weights -> replay_buffer -> ledger -> spare_prompts -> cursor -> redispatch

Nothing runs until the last link. Retried (from the UI, or by its parent) it goes on at the failed link as long as the
runtime is the same; on a new runtime all live links run again. Once a person has retried it with success, the `train`
flow run that had failed because of it is started again.
"""

import re
from datetime import datetime
from typing import Any
from uuid import UUID

import prefect.runtime
from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry

from flows.config_files import resolved
from flows.driver import Driver, owner_is_gone
from flows.home import Home
from flows.lost_worker import outlive_the_worker
from flows.tags import tag_with_run
from storage.run_config import RunConfig
from tasks.ray_runtime import RayRuntime
from tasks.reports import publish_restore_report, restore_markdown
from tasks.restore_artifact import plan_restore
from tasks.restores import LIVE_LINKS, restore_link, select_bundle, verify_selection
from tasks.runtime import UNRESTORED_STATES, OwnerIsGone, Runtime, ensure_runtime

RESTORE_DEPLOYMENT = "restore/restore"


@flow(name="restore", flow_run_name="restore-{config.name}", persist_result=False)
async def restore(config: RunConfig, driver: str | None = None) -> dict[str, Any]:
    """Fill a run's empty runtime from its store and let it run. `train` starts this; a person retries it.

    Args:
        config: The run. All keys: docs/configuration.md.
        driver: The flow run that trains the run. Empty: this one holds it until it ends.
    """
    outlive_the_worker()
    config = resolved(config)
    await tag_with_run(config.name)
    holder = driver or str(Driver.this_flow_run())
    runtime = RayRuntime(config.name, cache=Home.current().cache, driver=holder)
    restored = await restore_run(config, runtime, driver=holder, owner_is_gone=owner_is_gone)
    if prefect.runtime.flow_run.run_count > 1 and (parent := Driver.parse(holder)) is not None:
        await resume_parent(UUID(parent.flow_run), str(prefect.runtime.flow_run.id))
    return restored


async def restore_run(
    config: RunConfig, runtime: Runtime, *, driver: str, owner_is_gone: OwnerIsGone
) -> dict[str, Any]:
    """The chain. A runtime that runs already is left alone."""
    status = await ensure_runtime(runtime, config, driver, owner_is_gone)
    if status.state not in UNRESTORED_STATES:
        get_run_logger().info("run %s runs at step %d: nothing to restore", config.name, status.train_steps)
        return {"restored": False, "step": status.train_steps}
    selected = await select_bundle(config)
    for sequence, reason in selected["passed_over"]:
        get_run_logger().warning("passed over %08d: %s", sequence, reason)
    for warning in selected["warnings"]:
        get_run_logger().warning("%s", warning)
    plan = {"target": selected["target"], "anchor": selected["anchor"]}
    verified = await verify_selection(config, plan)
    planned = await plan_restore(config, plan)
    links = {link: await restore_link(runtime, link, plan, status.incarnation) for link in LIVE_LINKS}
    markdown = restore_markdown(config.name, status.incarnation, selected, verified, links)
    await publish_restore_report(markdown, config.name)
    facts = {"restored": selected["target"] is not None, "step": selected["step"]}
    return {**facts, "plan": plan, "planned": planned, "links": links}


async def restore_child(config: RunConfig, driver: str, *, key: str, earlier_than: datetime | None) -> FlowRun:
    """The `restore` flow run with this idempotency key, as a child of the calling one, when it has ended.

    One that failed before `earlier_than` is retried first, at its failed link.
    """
    child = await _awaited_child(config, driver, key)
    if earlier_than is not None and _failed_before(child, earlier_than):
        async with get_client() as client:
            await client.set_flow_run_state(child.id, AwaitingRetry(message="its `train` was retried"), force=True)
        child = await _awaited_child(config, driver, key)
    return child


async def _awaited_child(config: RunConfig, driver: str, key: str) -> FlowRun:
    return await arun_deployment(
        RESTORE_DEPLOYMENT,
        parameters={"config": config.model_dump(mode="json"), "driver": driver},
        flow_run_name=f"restore-{config.name}",
        as_subflow=True,
        idempotency_key=key,
        poll_interval=0.5,
    )


def _failed_before(child: FlowRun, moment: datetime) -> bool:
    failed = child.state is not None and child.state.is_final() and not child.state.is_completed()
    return failed and child.end_time is not None and child.end_time < moment


async def resume_parent(flow_run_id: UUID, restore_id: str) -> None:
    """Start the `train` flow run again that failed because this restore had; any other state is left alone."""
    async with get_client() as client:
        try:
            parent = await client.read_flow_run(flow_run_id)
        except ObjectNotFound:
            return
        state = parent.state
        if (
            state is None
            or not state.is_failed()
            or not re.search(rf"\({restore_id}\) did not restore", state.message or "")
        ):
            return
        get_run_logger().info("%s failed because of this restore and is started again", parent.name)
        await client.set_flow_run_state(flow_run_id, AwaitingRetry(message="its restore was retried"), force=True)
