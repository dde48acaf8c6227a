"""The links of the restore chain as tasks: select -> verify -> weights -> ... -> redispatch.

A link's result is kept under flow run, link, inputs and (for links that change the live runtime) incarnation. A
retried restore therefore goes on at the link that failed while the runtime lives, and starts again on an empty one.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from prefect import task
from prefect.context import TaskRunContext
from pydantic import BaseModel

from storage.catalog import Selection, select
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import Manifest, decode_manifest
from storage.run_config import RunConfig
from storage.snapshot_reader import read_bundle, verify_model_files
from tasks.retries import RETRIES, RETRY_DELAYS_S, retry_condition
from tasks.runtime import Runtime

LIVE_LINKS = ("weights", "replay_buffer", "ledger", "spare_prompts", "cursor", "redispatch")


def link_key(*names: str) -> Callable[[TaskRunContext, dict[str, Any]], str]:
    """A cache key function: this flow run, this task, and a hash of the named parameters.

    The task's name matters: two links with equal inputs would share a result and one would never run.
    """

    def key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
        inputs = {name: _plain(parameters[name]) for name in names}
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        return f"restore-{context.task_run.flow_run_id}-{context.task.name}-{digest}"

    return key


@task(
    name="select",
    task_run_name="select",
    persist_result=True,
    result_serializer="json",
    cache_key_fn=link_key("config"),
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def select_bundle(config: RunConfig) -> dict[str, Any]:
    """What to restore: sequences of the `target` bundle and its `anchor` (None: nothing yet, the initial model).

    Raises NoRestorableState with every candidate's reason.
    """
    selection = await asyncio.to_thread(_select, config)
    return {
        "target": _sequence(selection.target),
        "anchor": _sequence(selection.anchor),
        "kind": None if selection.target is None else selection.target.kind,
        "step": 0 if selection.target is None else selection.target.step,
        "cut_time": None if selection.target is None else selection.target.cut_time,
        "counts": {} if selection.target is None else dict(selection.target.counts),
        "passed_over": [[sequence, reason] for sequence, reason in selection.passed_over],
        "warnings": list(selection.warnings),
    }


@task(
    name="verify",
    task_run_name="verify",
    persist_result=True,
    result_serializer="json",
    cache_key_fn=link_key("config", "plan"),
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def verify_selection(config: RunConfig, plan: Mapping[str, int | None]) -> dict[str, Any]:
    """Read every byte that the plan needs and compare it; the counts of what is restored.

    Raises SnapshotCorrupt naming the file and what differs.
    """
    return await asyncio.to_thread(_verify, config, plan)


@task(
    name="restore-link",
    task_run_name="{link}",
    persist_result=True,
    result_serializer="json",
    cache_key_fn=link_key("link", "plan", "incarnation"),
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def restore_link(runtime: Runtime, link: str, plan: Mapping[str, int | None], incarnation: str) -> dict[str, Any]:
    """Reset and apply one live link (`LIVE_LINKS`); the counts it reports. Nothing runs before `redispatch`."""
    return await runtime.restore_link(link, plan, incarnation)


def _select(config: RunConfig) -> Selection:
    store = open_store(config.store.url, deadline_s=config.store.deadline_s)
    settings = config.checkpointing
    return select(store, RunLayout(config.name), mode=settings.restore_mode, allow_older=settings.allow_older)


def _verify(config: RunConfig, plan: Mapping[str, int | None]) -> dict[str, Any]:
    store = open_store(config.store.url, deadline_s=config.store.deadline_s)
    layout = RunLayout(config.name)
    counts = ("model_bytes", "rows", "groups_buffered", "groups_unfinished", "groups_recorded")
    report: dict[str, Any] = dict.fromkeys(counts, 0)
    if (anchor := plan["anchor"]) is not None:
        report["model_bytes"] = verify_model_files(store, _manifest(store, layout, anchor))
    if (target := plan["target"]) is not None:
        bundle = read_bundle(store, layout, _manifest(store, layout, target))
        report["rows"] = len(bundle.rows)
        report["groups_buffered"] = len(bundle.state.buffer)
        report["groups_unfinished"] = len(bundle.state.ledger)
        report["groups_recorded"] = len(bundle.state.trained)
    return report


def _manifest(store: Store, layout: RunLayout, sequence: int) -> Manifest:
    path = layout.manifest(sequence)
    return decode_manifest(store.read(path), path)


def _sequence(manifest: Manifest | None) -> int | None:
    return None if manifest is None else manifest.sequence


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value
