"""GRPO and PPO learn sort8: the real trainer, synchronously, on completions that plain torch samples."""

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from flows.config_files import load_config
from gpu_workers.environments.tasks import Task, build_task
from gpu_workers.models.tiny import ensure_model
from gpu_workers.training.trainer_actor import TrainerActor
from storage.run_config import RunConfig
from storage.schemas import TRAINING_ROWS

ROOT = Path(__file__).resolve().parents[1]
STEPS, WINDOW = 80, 10


class PlainSampler:
    """Samples whole batches of prompts of one length with a key-value cache, on one thread."""

    def __init__(self, config: RunConfig, model_dir: Path, task: Task) -> None:
        self._task = task
        self._most = config.generation.max_new_tokens
        self._size = config.algorithm.num_generations_per_prompt
        self._random = torch.Generator().manual_seed(config.seed)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def load(self, location: str) -> None:
        """Take over published weights."""
        self._model.load_state_dict(load_file(location), strict=False)

    @torch.no_grad()
    def groups(self, ordinals: range, *, version: int) -> list[pa.RecordBatch]:
        """One group of training rows per prompt."""
        prompts = [ordinal % len(self._task) for ordinal in ordinals for _ in range(self._size)]
        asked = torch.tensor([self._task.prompt(prompt)[0] for prompt in prompts])
        cache, given = DynamicCache(), asked
        tokens, logprobs = [], []
        for _ in range(self._most):
            logits = self._model(input_ids=given, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            distribution = torch.log_softmax(logits, dim=-1)
            given = torch.multinomial(distribution.exp(), 1, generator=self._random)
            tokens.append(given[:, 0])
            logprobs.append(distribution.gather(-1, given)[:, 0])
        columns = zip(prompts, torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
        rows = [self._row(index, ordinals.start, *column, version=version) for index, column in enumerate(columns)]
        return [
            pa.RecordBatch.from_pylist(rows[first : first + self._size], schema=TRAINING_ROWS)
            for first in range(0, len(rows), self._size)
        ]

    def _row(
        self, index: int, first: int, prompt: int, tokens: list[int], logprobs: list[float], *, version: int
    ) -> dict[str, Any]:
        asked, task_json = self._task.prompt(prompt)
        ends = [position for position, token in enumerate(tokens) if token in self._task.stop_token_ids]
        said = tokens[: ends[0] + 1] if ends else tokens
        group = f"e0-p{first + index // self._size}"
        return {
            "row_id": f"{group}_g{index % self._size}",
            "group_id": group,
            "prompt_id": prompt,
            "epoch": 0,
            "generation_index": index % self._size,
            "attempt": 0,
            "token_ids": [*asked, *said],
            "loss_mask": [False] * len(asked) + [True] * len(said),
            "logprobs": [0.0] * len(asked) + logprobs[: len(said)],
            "version_starts": [0, len(asked)],
            "versions": [-1, version],
            "reward": self._task.score(task_json, said),
            "masked": False,
            "finish_reason": "stop" if ends else "length",
            "digest": "",
        }


def learn(config: RunConfig, folder: Path, model_dir: Path) -> list[dict[str, float]]:
    """Metrics of each step of a synchronous run, with the share of exact answers."""
    trainer = TrainerActor(config, model_dir, 0, 1, folder / "weights", "bench")
    sampler = PlainSampler(config, model_dir, build_task(config.data))
    size = config.algorithm.num_prompts_per_step
    steps = []
    for step in range(1, config.algorithm.max_steps + 1):
        sampler.load(trainer.publish_weights(step - 1).location)
        groups = sampler.groups(range((step - 1) * size, step * size), version=step - 1)
        trainer.begin_step(step)
        trainer.train_microbatch(groups)
        rewards = [reward for group in groups for reward in group.column("reward").to_pylist()]
        exact = sum(reward == 1.0 for reward in rewards) / len(rewards)
        steps.append({**trainer.finish_step(step).metrics, "exact": exact})
    return steps


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both configurations start from the same warmed-up model."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.benchmark
@pytest.mark.parametrize("name", ["demo", "demo-ppo"])
def test_the_share_of_exact_answers_rises_by_at_least_0_3(name: str, tmp_path: Path, cache: Path) -> None:
    """Both demo configurations, without engines."""
    overrides = [f"store.url={tmp_path}/store", f"algorithm.max_steps={STEPS}"]
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    model_dir = ensure_model(config, cache)
    started, started_cpu = time.perf_counter(), time.process_time()
    steps = learn(config, tmp_path, model_dir)
    seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    print(f"\n{name}: {len(steps)} steps in {seconds:.0f} s, {cpu:.0f} s of CPU")
    shown = ("exact", "reward", "entropy", "clip_fraction", "gradient_norm", "value_loss", "explained_variance")
    print("".join(f"{column:>20}" for column in ("step", *shown)))
    for step in range(0, len(steps), max(1, len(steps) // 8)):
        window = steps[step : step + WINDOW]
        means = [sum(s.get(column, 0.0) for s in window) / len(window) for column in shown]
        print(f"{step + 1:>20}" + "".join(f"{value:>20.3f}" for value in means))
    before, after = (sum(s["exact"] for s in part) / len(part) for part in (steps[:5], steps[-WINDOW:]))
    print(f"exact answers: {before:.2f} -> {after:.2f}")
    assert after >= before + 0.3
