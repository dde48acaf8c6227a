"""Two ranks in two processes are one trainer."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed

from gpu_workers.training.ranks import OneRank
from gpu_workers.training.trainer_actor import TrainerActor
from storage.run_config import RunConfig

MEASURED = ("loss", "gradient_norm", "kl_k3", "entropy", "tokens", "reward")
PPO_MEASURED = (*MEASURED, "value_loss", "value_gradient_norm", "explained_variance", "advantage_deviation", "updates")


@pytest.fixture
def left_group() -> Iterator[None]:
    """Leaves the process group that this process joins as rank 0."""
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("left_group")
def test_two_ranks_train_as_one_and_their_checkpoint_fits_one(
    make_trainer: Any,
    make_rows: Any,
    run_step: Any,
    start_process: Any,
    config: RunConfig,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    steps = {step: make_rows(groups=5, seed=step) for step in (1, 2)}
    meeting, prefix = f"file://{tmp_path}/rendezvous", "run/checkpoints/step_000002"
    answer = start_process(config, model_dir, steps, rank=1, world_size=2, rendezvous=meeting, save=prefix)
    alone = make_trainer()
    expected = [run_step(alone, step, rows).metrics for step, rows in steps.items()]
    first = TrainerActor(config, model_dir, 0, 2, tmp_path / "weights", "ranks", rendezvous=meeting)
    results = [run_step(first, step, rows) for step, rows in steps.items()]
    files = first.save(prefix)
    second = answer()

    assert [result.weights_sha256 for result in results] == second["hashes"]
    for index, name in itertools.product(range(2), MEASURED):
        assert results[index].metrics[name] == pytest.approx(expected[index][name], rel=1e-4, abs=1e-6), name
        assert results[index].metrics[name] == second["metrics"][index][name]
    assert [entry["role"] for entry in second["files"]] == ["optimizer"]
    assert len({entry["path"] for entry in files + second["files"] if "shard-" in entry["path"]}) == 2

    restored = make_trainer()
    restored.restore(files + second["files"])
    assert restored.finish_step(2) == results[1]
    run_step(restored, 3, make_rows(groups=2, seed=3))


@pytest.mark.usefixtures("left_group")
def test_two_ranks_train_policy_and_critic_as_one(
    make_trainer: Any,
    make_rows: Any,
    run_step: Any,
    start_process: Any,
    config: RunConfig,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    """Two epochs of three minibatches: some hold rows of one rank only."""
    algorithm = {"kind": "ppo", "num_epochs": 2, "num_minibatches": 3, "kl_coefficient": 0.1, "learning_rate": 1e-3}
    config = RunConfig.model_validate(
        {**config.model_dump(), "algorithm": {**config.algorithm.model_dump(), **algorithm}}
    )
    steps = {step: make_rows(groups=1, seed=step) for step in (1, 2)}
    meeting, prefix = f"file://{tmp_path}/rendezvous", "run/checkpoints/step_000002"
    answer = start_process(config, model_dir, steps, rank=1, world_size=2, rendezvous=meeting, save=prefix)
    alone = make_trainer(**algorithm)
    expected = [run_step(alone, step, rows).metrics for step, rows in steps.items()]
    first = TrainerActor(config, model_dir, 0, 2, tmp_path / "weights", "ranks", rendezvous=meeting)
    results = [run_step(first, step, rows) for step, rows in steps.items()]
    files = first.save(prefix)
    second = answer()

    assert [result.weights_sha256 for result in results] == second["hashes"]
    for index, name in itertools.product(range(2), PPO_MEASURED):
        assert results[index].metrics[name] == pytest.approx(expected[index][name], rel=1e-3, abs=1e-5), name
        assert results[index].metrics[name] == second["metrics"][index][name]
    assert [entry["role"] for entry in second["files"]] == ["optimizer", "value_optimizer"]

    restored = make_trainer(**algorithm)
    restored.restore(files + second["files"])
    assert restored.finish_step(2) == results[1]
    run_step(restored, 3, make_rows(groups=2, seed=3))


def test_one_rank_alone_adds_nothing() -> None:
    assert (OneRank.rank, OneRank.size, OneRank.saving_group) == (0, 1, None)
