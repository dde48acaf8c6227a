"""Deployment `restore`: one task per link, from choosing a bundle to dispatching the unfinished work.

    select -> verify -> weights -> replay_buffer -> ledger -> spare_prompts -> cursor -> redispatch

Nothing runs until the last link. Retried (from the UI, or by its parent) it goes on at the failed link as long as the
runtime is the same; on a new runtime all live links run again.
"""

from typing import Any

from prefect import flow, get_run_logger

from flows.config_files import resolved
from flows.driver import Driver, owner_is_gone
from flows.home import Home
from flows.lost_worker import outlive_the_worker
from storage.run_config import RunConfig
from tasks.ray_runtime import RayRuntime
from tasks.reports import publish_restore_report, restore_markdown
from tasks.restores import LIVE_LINKS, restore_link, select_bundle, verify_selection
from tasks.runtime import UNRESTORED_STATES, OwnerIsGone, Runtime, ensure_runtime


@flow(name="restore", flow_run_name="restore-{config.name}", persist_result=False)
async def restore(config: RunConfig, driver: str | None = None) -> dict[str, Any]:
    """Fill a run's empty runtime from its store and let it run. `driver` is the flow run that will train it."""
    outlive_the_worker()
    config = resolved(config)
    holder = driver or str(Driver.this_flow_run())
    runtime = RayRuntime(config.name, cache=Home.current().cache, driver=holder)
    return await restore_run(config, runtime, driver=holder, owner_is_gone=owner_is_gone)


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
    plan = {"target": selected["target"], "anchor": selected["anchor"]}
    verified = await verify_selection(config, plan)
    links = {link: await restore_link(runtime, link, plan, status.incarnation) for link in LIVE_LINKS}
    markdown = restore_markdown(config.name, status.incarnation, selected, verified, links)
    await publish_restore_report(markdown, config.name)
    return {"restored": selected["target"] is not None, "step": selected["step"], "plan": plan, "links": links}
