"""The tiny Qwen2-style model: made and warmed up at set-up, cached as a Hugging Face folder.

Warming up is supervised training on noisy demonstrations of the run's task, so that reinforcement learning starts
from a policy that is right about one time in three.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.tasks import Task, build_task
from gpu_workers.models.tokenizer import PAD_TOKEN_ID
from storage.errors import ConfigurationError
from storage.run_config import RunConfig

_RECIPE_VERSION = 1
_HEAD_SIZE = 32
_BATCH_ROWS = 64
_LEARNING_RATE = 3e-3
_RAMP_STEPS = 50
_IGNORED = -100  # cross_entropy's label of positions without a target


def ensure_model(config: RunConfig, cache: Path) -> Path:
    """The Hugging Face folder (config.json, model.safetensors) of the policy's initial model.

    For `policy.model: tiny` the folder lies in `cache` under a hash of everything it depends on; it is made on the
    first call (about 20 s on one core) and appears whole or not at all. One thread and the run's seed make it the
    same, bit for bit, each time on the same machine and torch build. Any other value is the path of an existing
    folder. Raises ConfigurationError.
    """
    if config.policy.model != "tiny":
        return _existing_folder(config.policy.model)
    settings = _settings(config)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = cache / f"tiny-{digest[:16]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".tiny-", dir=cache))
    try:
        _write(make_model(config), staging)
        _publish(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def make_model(config: RunConfig) -> Qwen2ForCausalLM:
    """A new model with random weights, warmed up; fp32 on the CPU."""
    task = build_task(config.data)
    with _one_thread(config.seed):
        model = Qwen2ForCausalLM(_model_config(config, task)).float()
        _warm_up(model, task, steps=config.policy.warm_start_steps, noise=config.policy.warm_start_noise)
    return model.eval()


def _existing_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigurationError(
            f"policy.model is {name!r}, but {folder / 'config.json'} does not exist; "
            "give 'tiny' or a folder with a Hugging Face model"
        )
    return folder


def _settings(config: RunConfig) -> dict[str, object]:
    """Everything the warmed-up weights depend on."""
    task = build_task(config.data)
    # Another version of an environment shows other demonstrations.
    version = {"environment_version": task.environment.version} if isinstance(task, EnvironmentTask) else {}
    return {
        **version,
        "recipe": _RECIPE_VERSION,
        "seed": config.seed,
        "policy": config.policy.model_dump(mode="json"),
        "task": config.data.task,
        "task_seed": config.data.seed,
        "positions": _num_positions(config),
    }


def _num_positions(config: RunConfig) -> int:
    return max(512, config.generation.max_model_len)


def _model_config(config: RunConfig, task: Task) -> Qwen2Config:
    hidden_size = config.policy.hidden_size
    if hidden_size % _HEAD_SIZE:
        raise ConfigurationError(
            f"policy.hidden_size is {hidden_size}, which is not a multiple of {_HEAD_SIZE} (the size of an attention "
            f"head); use {max(1, round(hidden_size / _HEAD_SIZE)) * _HEAD_SIZE}"
        )
    heads = hidden_size // _HEAD_SIZE
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
        vocab_size=task.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=config.policy.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=_num_positions(config),
        tie_word_embeddings=config.policy.tie_word_embeddings,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=list(task.stop_token_ids),
        pad_token_id=PAD_TOKEN_ID,
    )


def _warm_up(model: Qwen2ForCausalLM, task: Task, *, steps: int, noise: float) -> None:
    """AdamW on demonstrations; the learning rate rises over the first steps and falls over the last half."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / _RAMP_STEPS, (steps - step) / (0.5 * steps))
        tokens, labels = _demonstrations(task, first=step * _BATCH_ROWS, noise=noise)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _demonstrations(task: Task, *, first: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of shape [rows, longest], int64; prompts and padding (on the right) have no label."""
    ordinals = range(first, first + _BATCH_ROWS)
    pairs = [(task.warm_start_prompt(ordinal), task.demonstration(ordinal, noise)) for ordinal in ordinals]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.full((len(pairs), longest), PAD_TOKEN_ID)
    labels = torch.full((len(pairs), longest), _IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        whole = torch.tensor(prompt + answer)
        tokens[row, : len(whole)] = whole
        labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    return tokens, labels


@contextmanager
def _one_thread(seed: int) -> Iterator[None]:
    """One thread and a seeded generator; both are put back afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _write(model: Qwen2ForCausalLM, folder: Path) -> None:
    """config.json and model.safetensors; a tied head is the embedding and is not stored twice."""
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder)


def _publish(staging: Path, folder: Path) -> None:
    """Give the finished folder its name; another process that was faster made the same."""
    staging.chmod(0o755)
    try:
        os.rename(staging, folder)
    except OSError:
        if not folder.exists():
            raise
