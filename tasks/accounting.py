"""The exactly-once audit of a run that lies in a store: its configuration and dataset are taken from there too."""

from collections.abc import Callable, Sequence

from gpu_workers.controller.prompt_source import PromptSource
from gpu_workers.environments.tasks import build_task
from storage.audit import Audit, account
from storage.errors import NoRestorableState
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import Manifest
from storage.run_config import DataConfig, RunConfig
from storage.runs import log_of_run
from tasks.saved_code import require_trusted


def config_of(store: Store, layout: RunLayout) -> RunConfig:
    """The configuration in the newest bundle of a run. Raises NotFound, NoRestorableState (nothing published yet),
    ConfigurationError (it names code that is not trusted).
    """
    for slot in reversed(log_of_run(store, layout)):
        if isinstance(slot, Manifest) and slot.config:
            return require_trusted(RunConfig.model_validate(slot.config))
    raise NoRestorableState(f"run '{layout.run}' in {store.url} has published no bundle yet: nothing to account for")


def audit(store: Store, layout: RunLayout) -> Audit:
    """Account for every prompt up to the frontier. Not to be called from an event loop."""
    return account(store, layout, order=prompt_order(config_of(store, layout).data))


def prompt_order(data: DataConfig) -> Callable[[int], Sequence[int]]:
    """The prompt ids of an epoch in the order in which the run's own prompt source hands them out.

    Raises: ConfigurationError for a task that isn't known here.
    """
    source = PromptSource(build_task(data), num_epochs=data.num_epochs, seed=data.seed, shuffle=data.shuffle)
    return source.ordinals
