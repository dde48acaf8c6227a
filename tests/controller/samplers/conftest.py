"""Every sampler of the contract, by name: the built-in ones and two of somebody else's."""

from pathlib import Path
from typing import Any

import pytest

from storage.records import BufferedGroup, GroupPhase, LedgerGroup, PromptRef, RecoveryLevel, Sibling

_LOOKAHEAD = ("in_order", "team_samplers:ReversedSteps")
_NAMES = (*_LOOKAHEAD, "weight_fifo", "ready_first", "windowed", "freshest", "team_samplers:ShortestFirst")


@pytest.fixture(autouse=True)
def _team_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other package is installed."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "team")


@pytest.fixture(params=_NAMES)
def sampler_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def options() -> Any:
    """The `async_rl` options of a sampler: `options(name, lag)`."""

    def of(name: str, lag: int = 1, **others: Any) -> dict[str, Any]:
        window = "max_lookahead_versions" if name in _LOOKAHEAD else "max_staleness_versions"
        chosen: dict[str, Any] = {"sampler": name, window: lag, **others}
        if name == "freshest":
            chosen |= {"sampler": "windowed", "freshest_first": True}
        if ":" in name:
            chosen |= {"sampler": "custom", "custom_sampler": name}
        return chosen

    return of


@pytest.fixture
def finished() -> Any:
    """A finished group: `finished(order, start_version, target_step)`."""

    def build(order: int, start_version: int = 0, target_step: int | None = None, tokens: int = 3) -> BufferedGroup:
        prompt = PromptRef(order, 0, "ab" * 32)
        rows = (f"{prompt.group_id}_g0",)
        return BufferedGroup(prompt, order, target_step, start_version, rows, (1.0,), tokens, ((0, tokens),))

    return build


@pytest.fixture
def running() -> Any:
    """An admitted, unfinished group: `running(order, start_version, target_step)`."""

    def build(order: int, start_version: int = 0, target_step: int | None = None) -> LedgerGroup:
        return LedgerGroup(
            PromptRef(order, 0, "ab" * 32),
            RecoveryLevel.SIBLING,
            batch=0,
            order=order,
            siblings=(Sibling(0),),
            phase=GroupPhase.ADMITTED,
            target_step=target_step,
            start_version=start_version,
        )

    return build
