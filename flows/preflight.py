"""What can be known to be wrong before anything is started."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from flows.home import Home
from flows.service_state import read_state
from gpu_workers.controller.samplers.build import build_sampler
from gpu_workers.environments.agents import require_agents
from gpu_workers.environments.tasks import build_task
from storage.catalog import live_bundles
from storage.errors import ConfigurationError, DatasetChanged, RunAlreadyLive
from storage.filesystem import open_store
from storage.identity import differences
from storage.layout import RunLayout
from storage.manifests import read_log
from storage.ownership import await_claimable
from storage.run_config import DataConfig, RunConfig


def check(config: RunConfig) -> None:
    """Task, sampler, model and store. Raises ConfigurationError, StoreUnsuitable."""
    require_agents(config, build_task(config.data))
    build_sampler(config)
    model = config.policy.model
    if model != "tiny" and not (Path(model).expanduser() / "config.json").is_file():
        raise ConfigurationError(
            f"policy.model is '{model}', but {Path(model) / 'config.json'} does not exist: "
            "give 'tiny' or the folder of a Hugging Face model"
        )
    open_store(config.store.url, deadline_s=config.store.deadline_s).probe()


def trained_steps(config: RunConfig) -> int:
    """Steps of the run's newest trainer checkpoint; 0 when there is none."""
    store = open_store(config.store.url, deadline_s=config.store.deadline_s)
    checkpoints, _ = live_bundles(read_log(store, RunLayout(config.name)))
    return max((checkpoint.step for checkpoint in checkpoints), default=0)


def refuse_another_dataset(config: RunConfig) -> None:
    """Raises DatasetChanged after a look at the run's newest manifest; the restore compares prompt by prompt."""
    store = open_store(config.store.url, deadline_s=config.store.deadline_s)
    checkpoints, snapshots = live_bundles(read_log(store, RunLayout(config.name)))
    if not (bundles := [*checkpoints, *snapshots]):
        return
    newest = max(bundles, key=lambda bundle: bundle.sequence)
    found = build_task(config.data).fingerprint()
    if newest.dataset_fingerprint not in (None, found):
        saved = DataConfig.model_validate(newest.config["data"]).model_dump()
        changed = differences({"data": saved}, {"data": config.data.model_dump()})
        raise DatasetChanged(
            f"run '{config.name}' was trained on another dataset than this configuration gives "
            f"({'; '.join(changed) or 'the code of the task changed'}): restore these values, or choose another name"
        )


def refuse_when_held(config: RunConfig, home: Home) -> None:
    """Raises RunAlreadyLive, naming the owner, when a driver holds the run in the Ray cluster that would be used, or a
    controller elsewhere shows signs of life in the store. Returns late when one elsewhere has fallen silent.
    """
    if refuse_when_live(config, home):
        return  # a controller that can be driven: its own claim is no reason to refuse
    store = open_store(config.store.url, deadline_s=config.store.deadline_s)
    await_claimable(store, RunLayout(config.name))


def refuse_when_live(config: RunConfig, home: Home) -> bool:
    """Whether the run has a controller in the Ray cluster that would be used. Raises RunAlreadyLive if it is driven."""
    environment = environment_of_running_ray(home)
    if environment is None:
        return False
    os.environ.update(environment)
    # Ray and Prefect read their settings from the environment when they are imported.
    import ray

    from flows.driver import owner_is_gone
    from tasks.ray_runtime import RayRuntime

    async def look() -> bool:
        status = await RayRuntime(config.name, cache=home.cache).status()
        if status is not None and status.driver is not None and not await owner_is_gone(status.driver):
            raise RunAlreadyLive(
                f"run '{config.name}' is live at step {status.train_steps}, driven by {status.driver}: wait for it, "
                "cancel its flow run, take the run over with --take-over, or choose another name"
            )
        return status is not None

    try:
        return asyncio.run(look())
    finally:
        ray.shutdown()


def environment_of_running_ray(home: Home) -> Mapping[str, str] | None:
    """What leads to the Ray cluster that would be used: that of this home's services, or the one of RAY_ADDRESS ({});
    None when there is none.
    """
    state = read_state(home)
    if state is not None and state.is_supervised() and state.status == "ready":
        return state.environment(home)
    return {} if os.environ.get("RAY_ADDRESS") else None
