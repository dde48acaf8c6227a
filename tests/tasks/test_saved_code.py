"""A saved configuration imports nothing by itself."""

import sys
from typing import Any

import pytest

from storage.errors import ConfigurationError
from storage.run_config import RunConfig
from tasks.saved_code import TRUSTED_VARIABLE, require_trusted

SAMPLER = {"sampler": "custom", "custom_sampler": "antigravity.samplers:Fly"}


def saved(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "theirs", **sections})


@pytest.mark.parametrize("task", ["sort8", "running_sum?turns=6", "reasoning_gym:chain_sum", "gym:/a/b.jsonl"])
def test_registered_tasks_need_no_trust(task: str) -> None:
    config = saved(data={"task": task})
    assert require_trusted(config) is config


@pytest.mark.parametrize("sections", [{"data": {"task": "antigravity:fly?high=1"}}, {"async_rl": SAMPLER}])
def test_code_that_a_store_names_is_imported_only_from_packages_that_the_reader_trusts(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.modules.pop("antigravity", None)
    for trusted in ("", "anti", "antigravity.other", "other, antigravityx"):
        monkeypatch.setenv(TRUSTED_VARIABLE, trusted)
        with pytest.raises(ConfigurationError, match="'theirs' names the code 'antigravity.*MIDFLIGHT_TRUSTED_MODULES"):
            require_trusted(saved(**sections))
    monkeypatch.setenv(TRUSTED_VARIABLE, "other, antigravity")
    assert require_trusted(saved(**sections)).name == "theirs"
    assert "antigravity" not in sys.modules
