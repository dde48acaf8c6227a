"""Code that a saved configuration names: never imported because a store says so.

Whoever reads a store (`audit`, `verify --drill`, `report`) may read one that somebody else has written. A configuration
that a person gives to `train` is another matter.
"""

import os

from gpu_workers.environments.tasks import named_import
from storage.errors import ConfigurationError
from storage.run_config import RunConfig

TRUSTED_VARIABLE = "MIDFLIGHT_TRUSTED_MODULES"


def require_trusted(saved: RunConfig) -> RunConfig:
    """The configuration, if all code that it names is registered or lies in a package of MIDFLIGHT_TRUSTED_MODULES.

    Raises ConfigurationError naming the import path.
    """
    named = (named_import(saved.data.task), saved.async_rl.custom_sampler)
    for path in named:
        if path is not None and not _is_trusted(path.partition(":")[0]):
            package = path.partition(":")[0].partition(".")[0]
            raise ConfigurationError(
                f"run '{saved.name}' names the code {path!r}, which is not imported because a store says so; set "
                f"{TRUSTED_VARIABLE}={package} if you trust it (several: separated by commas)"
            )
    return saved


def _is_trusted(module: str) -> bool:
    trusted = [name.strip() for name in os.environ.get(TRUSTED_VARIABLE, "").split(",") if name.strip()]
    return any(module == name or module.startswith(f"{name}.") for name in trusted)
