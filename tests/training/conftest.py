"""A small untrained model, rows made from a seed, and trainers on temporary folders."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gpu_workers.training.trainer_actor import TrainerActor
from storage.records import RowKind
from storage.run_config import RunConfig
from storage.schemas import TRAINING_ROWS, row_digest

VOCABULARY = 24
GROUP_SIZE = 4
PROCESS = Path(__file__).with_name("trainer_process.py")

Rows = list[pa.RecordBatch]


def build_model(folder: Path, *, tied: bool = True, hidden: int = 32) -> Path:
    """A Qwen2 model of one layer with random weights, saved as a Hugging Face folder."""
    torch.manual_seed(5)
    settings = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=1,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    Qwen2ForCausalLM(settings).save_pretrained(folder)
    return folder


def training_row(group: int, slot: int, random: np.random.Generator, **changes: Any) -> dict[str, Any]:
    """One row: a prompt of 3 tokens and 2 to 9 sampled ones, whose log-probabilities are near those of the model."""
    sampled = int(random.integers(2, 10))
    length = 3 + sampled
    row: dict[str, Any] = {
        "row_id": f"e0-p{group}_g{slot}",
        "group_id": f"e0-p{group}",
        "prompt_id": group,
        "epoch": 0,
        "generation_index": slot,
        "attempt": 0,
        "token_ids": random.integers(0, VOCABULARY, length).tolist(),
        "loss_mask": [False] * 3 + [True] * sampled,
        "logprobs": [0.0] * 3 + (-np.log(VOCABULARY) + random.normal(0, 0.3, sampled)).tolist(),
        "version_starts": [0, 3],
        "versions": [-1, 0],
        "reward": float(random.random()),
        "masked": False,
        "finish_reason": "stop",
        **changes,
    }
    row["digest"] = row_digest(RowKind.TRAINING_ROW, row)
    return row


def build_rows(*, groups: int, seed: int = 0, **changes: Any) -> Rows:
    """One record batch per group of `GROUP_SIZE` rows."""
    random = np.random.default_rng(seed)
    return [
        pa.RecordBatch.from_pylist(
            [training_row(1000 * seed + group, slot, random, **changes) for slot in range(GROUP_SIZE)],
            schema=TRAINING_ROWS,
        )
        for group in range(groups)
    ]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    return lambda **settings: build_model(tmp_path / f"model-{len(list(tmp_path.iterdir()))}", **settings)


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., Rows]:
    return build_rows


@pytest.fixture
def edit_row() -> Callable[..., pa.RecordBatch]:
    """A whole group whose row in slot 1 has other values."""

    def edited(**changes: Any) -> pa.RecordBatch:
        (batch,) = build_rows(groups=1)
        rows = batch.to_pylist()
        rows[1].update(changes)
        return pa.RecordBatch.from_pylist(rows, schema=TRAINING_ROWS)

    return edited


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path)


def run_config(folder: Path, **algorithm: Any) -> RunConfig:
    settings = {"num_generations_per_prompt": GROUP_SIZE, "microbatch_rows": 6, "learning_rate": 1e-2, **algorithm}
    return RunConfig.model_validate(
        {"name": "test", "algorithm": settings, "store": {"url": str(folder / "store"), "deadline_s": 20}}
    )


@pytest.fixture
def make_trainer(tmp_path: Path, model_dir: Path) -> Callable[..., TrainerActor]:
    def make(*, model: Path = model_dir, sections: Mapping[str, Any] | None = None, **algorithm: Any) -> TrainerActor:
        configuration = run_config(tmp_path, **algorithm)
        if sections:
            configuration = RunConfig.model_validate({**configuration.model_dump(), **sections})
        return TrainerActor(configuration, model, 0, 1, tmp_path / "weights", "first")

    return make


@pytest.fixture
def run_step() -> Callable[..., Any]:
    """Train one step; each inner list is one call."""

    def run(trainer: TrainerActor, step: int, *calls: Rows) -> Any:
        trainer.begin_step(step)
        for rows in calls:
            trainer.train_microbatch(rows)
        return trainer.finish_step(step)

    return run


@pytest.fixture
def start_process(tmp_path: Path) -> Callable[..., Callable[[], dict[str, Any]]]:
    """Start a trainer in a fresh process (see `trainer_process.py`); calling what is returned waits for its answer."""

    def start(
        configuration: RunConfig, model: Path, steps: Mapping[int, Sequence[pa.RecordBatch]], **order: Any
    ) -> Callable[[], dict[str, Any]]:
        folder = tmp_path / f"process-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for step, rows in steps.items():
            with pa.OSFile(str(folder / f"{step}.arrow"), "wb") as sink, pa.ipc.new_file(sink, TRAINING_ROWS) as file:
                for batch in rows:
                    file.write_batch(batch)
        content = {
            "config": configuration.model_dump(mode="json"),
            "model_dir": str(model),
            "steps": sorted(steps),
            "rank": 0,
            "world_size": 1,
            "rendezvous": None,
            "restore": None,
            "save": None,
            **order,
        }
        (folder / "order.json").write_text(json.dumps(content))
        process = subprocess.Popen([sys.executable, str(PROCESS), str(folder)], stderr=subprocess.PIPE, text=True)

        def answer() -> dict[str, Any]:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            return dict(json.loads((folder / "answer.json").read_text()))

        return answer

    return start
