"""What tests of several packages share: a store whose calls fail or wait, a runtime without Ray, made-up prompts."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings

from storage.errors import RunAlreadyLive, StaleIncarnation
from storage.filesystem import Store
from storage.identity import identity
from storage.run_config import RunConfig

# The same examples at each run, so that a failure is this change's; `--hypothesis-profile=fuzz` looks for new ones.
settings.register_profile("same", derandomize=True, print_blob=True, deadline=None, max_examples=80)
settings.register_profile("fuzz", print_blob=True, deadline=None, max_examples=2000)
settings.load_profile("same")

CHANGES = ("write", "create_exclusive", "delete")


class Hold:
    """A store call that waits: `reached` once it was made, goes on after `release`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._go = threading.Event()

    def strike(self) -> None:
        self.reached.set()
        assert self._go.wait(20), "a held store call was never released"

    def release(self) -> None:
        self._go.set()


@dataclass
class Trouble:
    """What befalls one call of `operation` whose path holds `path_part`, after `passing` such calls went well."""

    operation: str
    path_part: str
    effect: Exception | Hold
    passing: int
    late: bool

    def befalls(self, operation: str, path: str) -> bool:
        kinds = CHANGES if self.operation == "change" else (self.operation,)
        if operation not in kinds or self.path_part not in path:
            return False
        self.passing -= 1
        return self.passing < 0

    def strike(self) -> None:
        if isinstance(self.effect, Exception):
            raise self.effect
        self.effect.strike()


class TroubledStore:
    """A store whose chosen calls fail or wait, each once; all others go to the real one."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.troubles: list[Trouble] = []
        self.calls: list[tuple[str, str]] = []

    def fail(self, operation: str, path_part: str, error: Exception, *, passing: int = 0, late: bool = False) -> None:
        """Let one such call fail, if `late` after it has happened. Operation "change" is any that writes or deletes."""
        self.troubles.append(Trouble(operation, path_part, error, passing, late))

    def hold(self, operation: str, path_part: str) -> Hold:
        """Let the next such call wait."""
        hold = Hold()
        self.troubles.append(Trouble(operation, path_part, hold, passing=0, late=False))
        return hold

    def changes(self) -> list[tuple[str, str]]:
        """The calls so far that wrote or deleted something."""
        return [call for call in self.calls if call[0] in CHANGES]

    def __getattr__(self, operation: str) -> Any:
        member = getattr(self._inner, operation)
        if not callable(member):
            return member

        def call(path: str, *rest: Any) -> Any:
            self.calls.append((operation, path))
            trouble = next((t for t in self.troubles if t.befalls(operation, path)), None)
            if trouble is None:
                return member(path, *rest)
            self.troubles.remove(trouble)
            if trouble.late:
                member(path, *rest)
            trouble.strike()
            return member(path, *rest)

        return call


@pytest.fixture
def troubled() -> Callable[[Store], TroubledStore]:
    """Wraps a store, so that calls can be made to fail or to wait."""
    return TroubledStore


class FakeRuntime:
    """A `tasks.runtime.Runtime` in memory. Calls are written down; a chosen call fails once for each error given."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.calls: list[str] = []
        self.live: dict[str, Any] | None = None
        self.committed = 0
        self.end_of_data_after: int | None = None
        self.durable_after: dict[int, int] = {}
        self.checkpoint_failure: str | None = None
        self.logs: dict[str, Any] = {"records": [], "lost": 0}
        self.launching = False
        self._errors: dict[str, list[BaseException]] = {}

    @property
    def run(self) -> str:
        return self.config.name

    def fail(self, call: str, *errors: BaseException) -> None:
        """Let the next calls whose text starts with `call` fail."""
        self._errors[call] = list(errors)

    def start(self, incarnation: str = "inc-1", *, state: str = "running", driver: str | None = None) -> None:
        """A runtime that lives already."""
        self.live = {"incarnation": incarnation, "state": state, "driver": driver, "config": self.config}

    async def status(self) -> Any:
        from tasks.runtime import RuntimeStatus  # Prefect is imported only where it is tested

        if self._errors.get("status"):
            raise self._errors["status"].pop(0)
        if self.live is None:
            return None
        config = self.live["config"]
        return RuntimeStatus(
            run=self.run,
            incarnation=self.live["incarnation"],
            state=self.live["state"],
            train_steps=self.committed,
            trainer_version=self.committed,
            max_steps=config.algorithm.max_steps,
            driver=self.live["driver"],
            config_fingerprint=identity(config).fingerprint,
        )

    async def launch(self, config: RunConfig, incarnation: str, *, take_over: bool = False) -> None:
        self._note("launch by take-over" if take_over else "launch")
        if self.launching or self.live is not None:
            raise RunAlreadyLive("run is being started")
        self.launching = True
        await asyncio.sleep(0)
        self.launching = False
        self.config = config
        self.start(incarnation, state="empty")

    async def end(self, incarnation: str) -> None:
        self._note("end")
        if self.live is not None and self.live["incarnation"] == incarnation:
            self.live = None

    async def attach(self, driver: str, *, take_over: bool = False) -> None:
        self._note("attach by take-over" if take_over else "attach")
        live = self._living()
        if live["driver"] not in (None, driver) and not take_over:
            raise RunAlreadyLive(f"run is driven by {live['driver']}")
        live["driver"] = driver

    async def detach(self, driver: str) -> None:
        self._note("detach")
        if self._living()["driver"] == driver:
            self._living()["driver"] = None

    async def heartbeat(self, driver: str) -> None:
        self._note("heartbeat")

    async def read_logs(self) -> Mapping[str, Any]:
        logs, self.logs = self.logs, {"records": [], "lost": 0}
        return logs

    async def restore_link(self, link: str, plan: Mapping[str, Any], incarnation: str) -> dict[str, Any]:
        self._note(f"link {link}")
        self._living()["state"] = "running" if link == "redispatch" else "restoring"
        return {"link": link}

    async def train_steps(self, first: int, last: int, incarnation: str) -> list[dict[str, Any]]:
        self._note(f"train {first}-{last}")
        reports: list[dict[str, Any]] = []
        for step in range(first, last + 1):
            if self.end_of_data_after is not None and step > self.end_of_data_after:
                return [*reports, {"step": step - 1, "end_of_data": True}]
            self.committed = max(self.committed, step)
            durable = {"durable_step": self.durable_after[step]} if step in self.durable_after else {}
            reports.append({"step": step, "rewards_mean": step / 100, "seconds": 0.1, **durable})
        return reports

    async def attempt_snapshot(self, number: int, *, force: bool, incarnation: str) -> dict[str, Any]:
        self._note("forced snapshot" if force else "snapshot")
        return {"outcome": "completed", "number": number, "sequence": 1}

    async def checkpoint(self, *, incarnation: str) -> dict[str, Any]:
        self._note("checkpoint")
        return {"outcome": "completed", "step": self.committed, "sequence": 1}

    async def close(self, *, snapshot: bool) -> dict[str, Any]:
        self._note(f"close snapshot={snapshot}")
        incarnation = self._living()["incarnation"]
        return {"state": "ended", "incarnation": incarnation, "checkpoint_failure": self.checkpoint_failure}

    async def preempt(self, reason: str) -> None:
        self._note("preempt")
        self.live = None

    def _living(self) -> dict[str, Any]:
        if self.live is None:
            raise StaleIncarnation("no controller")
        return self.live

    def _note(self, call: str) -> None:
        self.calls.append(call)
        for start, errors in self._errors.items():
            if call.startswith(start) and errors:
                raise errors.pop(0)


@pytest.fixture
def fake_runtime() -> FakeRuntime:
    """The runtime of a run named `run`, not started yet."""
    return FakeRuntime(RunConfig(name="run"))


class FakeDataset:
    """Procedural prompts; `changed` ordinals have another content, as if the dataset had been swapped."""

    def __init__(self, size: int, changed: frozenset[int] = frozenset()) -> None:
        self._size = size
        self._changed = changed

    def __len__(self) -> int:
        return self._size

    def prompt(self, ordinal: int) -> tuple[tuple[int, ...], str]:
        salt = 7 if ordinal in self._changed else 0
        return (1, 2, ordinal % 50 + salt), json.dumps({"ordinal": ordinal})

    def agent(self, ordinal: int) -> str:
        return f"agent-{ordinal % 2}"

    def fingerprint(self) -> str:
        prompts = [self.prompt(ordinal) for ordinal in range(self._size)]
        return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


@pytest.fixture
def fake_dataset() -> Callable[..., FakeDataset]:
    """Makes datasets: `fake_dataset(size)`."""
    return FakeDataset
