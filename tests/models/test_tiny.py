"""The tiny model made at set-up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpu_workers.environments.tasks import build_task
from gpu_workers.models.tiny import ensure_model, make_model
from storage.errors import ConfigurationError
from storage.run_config import RunConfig


def _config(name: str = "tiny", **changes: Any) -> RunConfig:
    policy = {"hidden_size": 32, "num_layers": 1, "warm_start_steps": 2} | changes.pop("policy", {})
    return RunConfig(name=name, policy=policy, **changes)


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path):
    first = ensure_model(_config(), tmp_path / "a") / "model.safetensors"
    second = ensure_model(_config(), tmp_path / "b") / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()


def test_another_seed_or_setting_makes_another_folder(tmp_path: Path):
    configs = [_config(), _config(seed=2), _config(policy={"warm_start_steps": 3}), _config(data={"seed": 5})]
    folders = {ensure_model(config, tmp_path) for config in configs}
    assert len(folders) == 4


def test_a_second_call_returns_the_cached_folder_untouched(tmp_path: Path):
    folder = ensure_model(_config(), tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_model(_config(name="other"), tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_making_a_model_leaves_torchs_generator_and_threads_alone(tmp_path: Path):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    ensure_model(_config(), tmp_path)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("tied", [True, False])
def test_untied_models_store_a_head_of_their_own(tmp_path: Path, tied: bool):
    folder = ensure_model(_config(policy={"tie_word_embeddings": tied}), tmp_path)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied


def test_warming_up_teaches_the_demonstrations():
    losses = []
    for steps in (1, 40):
        config = _config(policy={"warm_start_steps": steps, "warm_start_noise": 0.0})
        task = build_task(config.data)
        tokens = torch.tensor([task.warm_start_prompt(n) + task.demonstration(n, 0.0) for n in range(20_000, 20_016)])
        model = make_model(config)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[:, 8:-1]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 9:].flatten()).item())
    assert losses[1] < 0.85 * losses[0]


def test_a_folder_of_ones_own_is_used_as_it_is(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert ensure_model(_config(policy={"model": str(tmp_path)}), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_a_missing_folder_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"policy\.model is '.*absent', but .*config\.json does not exist"):
        ensure_model(_config(policy={"model": str(tmp_path / "absent")}), tmp_path)


def test_a_hidden_size_that_heads_cannot_share_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"policy\.hidden_size is 40, .* use 32"):
        ensure_model(_config(policy={"hidden_size": 40}), tmp_path)
