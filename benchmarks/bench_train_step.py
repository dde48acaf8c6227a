"""One optimizer step of the trainer against a plain loop over rows: 16 groups of 8 rows, the default tiny model."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from gpu_workers.training.trainer_actor import TrainerActor
from storage.run_config import RunConfig
from storage.schemas import TRAINING_ROWS

ROUNDS = 7
VOCABULARY, PROMPT, GROUPS, GROUP_SIZE = 32, 10, 16, 8


def build_model(folder: Path) -> Path:
    """336 thousand random parameters."""
    settings = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(settings).save_pretrained(folder)
    return folder


def build_rows() -> list[pa.RecordBatch]:
    """Rows of 18 to 22 tokens, 10 of them the prompt."""
    random = np.random.default_rng(0)

    def row(group: int, slot: int) -> dict[str, object]:
        sampled = int(random.integers(8, 13))
        return {
            "row_id": f"p{group}_g{slot}",
            "group_id": f"p{group}",
            "prompt_id": group,
            "epoch": 0,
            "generation_index": slot,
            "attempt": 0,
            "token_ids": random.integers(0, VOCABULARY, PROMPT + sampled).tolist(),
            "loss_mask": [False] * PROMPT + [True] * sampled,
            "logprobs": [0.0] * PROMPT + [-3.4] * sampled,
            "version_starts": [0, PROMPT],
            "versions": [-1, 0],
            "reward": float(random.random()),
            "masked": False,
            "finish_reason": "stop",
            "digest": "",
        }

    return [
        pa.RecordBatch.from_pylist([row(group, slot) for slot in range(GROUP_SIZE)], schema=TRAINING_ROWS)
        for group in range(GROUPS)
    ]


class PlainLoop:
    """What one writes first: a forward and backward pass per row, logits of every position."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._adam = torch.optim.AdamW(self._model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, groups: list[pa.RecordBatch]) -> None:
        """One optimizer step."""
        self._adam.zero_grad()
        tokens = sum(sum(mask) for group in groups for mask in group.column("loss_mask").to_pylist())
        for group in groups:
            rewards = torch.tensor(group.column("reward").to_pylist())
            advantages = (rewards - rewards.mean()) / rewards.std()
            for row, advantage in zip(group.to_pylist(), advantages, strict=True):
                token_ids = torch.tensor([row["token_ids"]])
                logprobs = self._model(input_ids=token_ids).logits[0, :-1].log_softmax(-1)
                taken = logprobs.gather(-1, token_ids[0, 1:, None])[:, 0]
                ratio = (taken - torch.tensor(row["logprobs"][1:])).exp()
                losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                ((losses * torch.tensor(row["loss_mask"][1:])).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._adam.step()


def trainer_step(folder: Path, model_dir: Path, microbatch_rows: int) -> Callable[[list[pa.RecordBatch]], None]:
    """A function that runs the next step of a trainer of its own."""
    algorithm = {"num_generations_per_prompt": GROUP_SIZE, "microbatch_rows": microbatch_rows}
    config = RunConfig.model_validate({"name": "bench", "algorithm": algorithm, "store": {"url": str(folder)}})
    trainer = TrainerActor(config, model_dir, 0, 1, folder / "weights", "bench")

    def run(groups: list[pa.RecordBatch]) -> None:
        step = int(trainer.ready()["step"]) + 1
        trainer.begin_step(step)
        trainer.train_microbatch(groups)
        trainer.finish_step(step)

    return run


@pytest.mark.benchmark
def test_a_step_is_at_least_three_times_as_fast_as_a_loop_over_rows(tmp_path: Path) -> None:
    """Interleaved, medians; the ratio is what counts."""
    model_dir, rows = build_model(tmp_path / "model"), build_rows()
    variants = {f"trainer, {size} rows a pass": trainer_step(tmp_path, model_dir, size) for size in (8, 32, 64, 128)}
    variants["plain loop over rows"] = PlainLoop(model_dir).step
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for measured in [False] + [True] * ROUNDS:
        for name, step in variants.items():
            started = time.perf_counter()
            step(rows)
            if measured:
                seconds[name].append(time.perf_counter() - started)
    plain = median(seconds["plain loop over rows"])
    tokens = sum(sum(mask) for group in rows for mask in group.column("loss_mask").to_pylist())
    print(f"\n{'one step, 128 rows, 1 thread':<28}{'ms':>8}{'trained tokens/s':>18}{'speed':>8}")
    for name, values in seconds.items():
        middle = median(values)
        print(f"{name:<28}{middle * 1e3:>8.0f}{tokens / middle:>18.0f}{plain / middle:>7.1f}x")
    assert median(seconds["trainer, 64 rows a pass"]) * 3 <= plain
