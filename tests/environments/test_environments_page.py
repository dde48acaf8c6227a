"""The environment that docs/environments.md shows can be played."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.interface import turn_rng
from gpu_workers.environments.registry import environment_names
from gpu_workers.environments.states import canonical_state
from gpu_workers.environments.tasks import build_task
from storage.run_config import DataConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/environments.md").read_text()


def test_the_page_s_environment_is_registered_by_its_path_and_played(monkeypatch: pytest.MonkeyPatch):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    module = ModuleType("countdown")
    exec(compile(block, "docs/environments.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "countdown", module)
    task = build_task(DataConfig(task="countdown:Countdown?start=5"))
    assert isinstance(task, EnvironmentTask)
    game, rewards = task.environment, []
    step = game.reset({"start": 5}, turn_rng(1, generation_index=0, turn=0))
    while not step.done:
        rng = turn_rng(1, generation_index=0, turn=len(rewards))
        step = game.step(step.state, game.demonstrate(step.state, rng, 0.0), rng)
        canonical_state(step.state, where="countdown")
        rewards.append(step.reward)
    assert rewards == [1.0] * 5
    assert task.demonstration(3, 0.1)


def test_the_page_lists_every_built_in_environment():
    assert [name for name in environment_names() if f"| `{name}` |" not in PAGE] == []
