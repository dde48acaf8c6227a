"""The plan of a restore in the Prefect UI, before it is paid, and beside it what it came to."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import acreate_table_artifact

from storage.errors import MidflightError
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import decode_manifest
from storage.restore_figures import RestoreFigures, side_by_side
from storage.run_config import RunConfig
from tasks.planned_restores import PastRestore, last_restore, plan_for
from tasks.reports import REFRESH_S, artifact_key, best_effort
from tasks.restores import link_key


@task(
    name="plan",
    task_run_name="plan",
    persist_result=True,
    result_serializer="json",
    cache_key_fn=link_key("config", "plan"),
)
async def plan_restore(config: RunConfig, plan: Mapping[str, int | None]) -> dict[str, Any]:
    """The figures of the restore that is about to be made, shown in the UI at once. Empty for a fresh start, and when
    they can't be told (a damaged trace, a store that fails): no restore waits for them.
    """
    target = plan["target"]
    if target is None:
        return {}
    try:
        figures = await asyncio.to_thread(_figures, config, target)
    except MidflightError as error:
        get_run_logger().warning("what the restore of bundle %08d will come to is not known: %s", target, error)
        return {}
    await _publish(config.name, f"Before the restore of bundle {target:08d}", figures, None)
    return asdict(figures)


def _figures(config: RunConfig, sequence: int) -> RestoreFigures:
    store = open_store(config.store.url, deadline_s=config.store.deadline_s)
    layout = RunLayout(config.name)
    path = layout.manifest(sequence)
    return plan_for(store, layout, decode_manifest(store.read(path), path), config).figures


class RestoreOutcome:
    """Brings the table up to date while a restored run trains: every REFRESH_S seconds at most, until all that was
    launched again is done. A run that restored nothing is looked at once.
    """

    def __init__(self, config: RunConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._due_at = 0.0
        self.is_over = False

    async def refresh(self) -> None:
        """Show what the restore has come to so far, if that is due. A store that fails costs no step."""
        if self.is_over or self._clock() < self._due_at:
            return
        self._due_at = self._clock() + REFRESH_S
        try:
            past = await asyncio.to_thread(self._read)
        except MidflightError as error:
            get_run_logger().warning("what the restore came to is not shown yet: %s", error)
            return
        self.is_over = past is None or past.outcome.is_complete
        if past is not None:
            so_far = "" if past.outcome.is_complete else ", so far"
            what = f"The restore of bundle {past.sequence:08d} and what it came to{so_far}"
            await _publish(self._config.name, what, past.plan, past.outcome.figures)

    def _read(self) -> PastRestore | None:
        store = open_store(self._config.store.url, deadline_s=self._config.store.deadline_s)
        return last_restore(store, RunLayout(self._config.name), self._config)


async def _publish(run: str, description: str, plan: RestoreFigures | None, actual: RestoreFigures | None) -> None:
    rows = [{"what": what, "planned": p, "actual": a} for what, p, a in side_by_side(plan, actual)]
    key = artifact_key("restore-plan", run)
    await best_effort("restore-plan", acreate_table_artifact(rows, key=key, description=description))
