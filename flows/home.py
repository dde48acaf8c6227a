"""Midflight's own folder: where local services, logs and, by default, the runs are kept."""

import os
from dataclasses import dataclass
from pathlib import Path

HOME_VARIABLE = "MIDFLIGHT_HOME"
DEFAULT_HOME = ".midflight"


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below `MIDFLIGHT_HOME`, or `.midflight` in the current folder. Nothing else builds them."""

    root: Path

    @staticmethod
    def current() -> "Home":
        """The home this process was told to use."""
        return Home(Path(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME).resolve())

    @property
    def store(self) -> Path:
        """Runs, unless `store.url` says otherwise."""
        return self.root / "store"

    @property
    def cache(self) -> Path:
        """Tiny models, by a hash of their settings."""
        return self.root / "cache"

    @property
    def services(self) -> Path:
        """What the local services need and write."""
        return self.root / "services"

    @property
    def logs(self) -> Path:
        """One log file per local service."""
        return self.services / "logs"

    @property
    def users(self) -> Path:
        """One file per process that needs the services now."""
        return self.services / "users"

    @property
    def lock(self) -> Path:
        """Held while someone joins, starts or ends the services."""
        return self.services / "lock"

    @property
    def state(self) -> Path:
        """The services that run now (`ServiceState`)."""
        return self.services / "services.json"

    @property
    def deployed(self) -> Path:
        """Which flows were deployed last, and on which server."""
        return self.services / "deployed"

    @property
    def ray_address(self) -> Path:
        """Written by the Ray head when it is ready."""
        return self.services / "ray-address"

    @property
    def ray_token(self) -> Path:
        """The secret of the local Ray cluster, readable by its user only."""
        return self.services / "ray-token"

    @property
    def prefect(self) -> Path:
        """PREFECT_HOME of the local server, worker and flows."""
        return self.root / "prefect"
