"""A streamed step through the real trainer: groups come in another order and in pieces, the update is the same."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import torch

from gpu_workers.training.trainer_actor import TrainerActor

Rows = list[pa.RecordBatch]
EXACT = 1e-9
ALGORITHMS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sequence_mean": {"loss_normalization": "sequence_mean"},
    "constant_length": {"loss_normalization": "constant_length", "baseline": "leave_one_out"},
    "kl_and_entropy": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "filter_equal_rewards": False},
    "grpo_of_two_epochs": {"num_epochs": 2, "num_minibatches": 3, "clip_reference": "trainer"},
    "ppo": {"kind": "ppo"},
    "ppo_of_three_epochs": {"kind": "ppo", "num_epochs": 3, "num_minibatches": 4},
    "ppo_with_plain_advantages": {"kind": "ppo", "critic": {"normalize_advantages": False}},
}


@pytest.fixture
def make_exact(make_trainer: Any) -> Callable[..., TrainerActor]:
    """A trainer whose networks compute in float64, so that only the order of its sums differs."""

    def make(**settings: Any) -> TrainerActor:
        trainer: TrainerActor = make_trainer(**settings)
        learner = trainer._learner
        for network in (learner.policy, learner.reference, learner.critic):
            if network is not None:
                network._model.double()
        if learner.critic is not None:
            head = learner.critic._model.value_head
            learner.critic._head = lambda states: head(states).squeeze(-1)  # which is float32 otherwise
            random = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for value in head.parameters():
                    value.copy_(0.3 * torch.randn(value.shape, generator=random))
        return trainer

    return make


def weights(trainer: TrainerActor) -> dict[str, Any]:
    learner = trainer._learner
    critic = {} if learner.critic is None else learner.critic.tensors()
    return {**learner.policy.tensors(), **{f"critic.{name}": value for name, value in critic.items()}}


def stream(trainer: TrainerActor, step: int, *chunks: Rows) -> Any:
    """What the train pump does: groups of a chunk one call after the other, a flush once the step is whole."""
    trainer.begin_step(step)
    for chunk in chunks:
        for group in chunk:
            trainer.train_microbatch([group])
    trainer.flush_microbatches()
    return trainer.finish_step(step)


@pytest.mark.parametrize("settings", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_streamed_step_is_the_update_of_the_whole_batch(
    make_exact: Any, make_rows: Any, settings: dict[str, Any]
) -> None:
    whole, streamed = make_exact(**settings), make_exact(**settings)
    for step in (1, 2):
        rows = make_rows(groups=7, seed=step)
        expected = stream(whole, step, rows).metrics
        found = stream(streamed, step, [rows[4], rows[6]], [rows[0]], [rows[5], rows[1], rows[3], rows[2]]).metrics
        assert found["updates"] == expected["updates"] > 0
        for name in ("loss", "gradient_norm", "tokens", "trained_rows", "entropy", "kl_k3"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name
    theirs = weights(streamed)
    for name, value in weights(whole).items():
        torch.testing.assert_close(theirs[name], value, rtol=EXACT, atol=EXACT, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("settings", [{}, {"kind": "ppo", "num_epochs": 2}], ids=["grpo", "ppo"])
def test_how_a_step_is_cut_into_chunks_changes_no_bit(make_trainer: Any, make_rows: Any, settings: Any) -> None:
    rows = make_rows(groups=5)
    hashes = {
        stream(make_trainer(**settings), 1, *chunks).weights_sha256
        for chunks in ([rows], [rows[:2], rows[2:]], [[group] for group in rows])
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("settings", [{}, {"kind": "ppo", "num_epochs": 2}], ids=["grpo", "ppo"])
def test_until_its_last_chunk_a_streamed_step_changes_nothing_and_can_be_begun_again(
    make_trainer: Any, make_rows: Any, settings: Any
) -> None:
    rows = make_rows(groups=4)
    trainer = make_trainer(**settings)
    before = {name: value.clone() for name, value in weights(trainer).items()}
    trainer.begin_step(1)
    for group in rows[:3]:
        trainer.train_microbatch([group])
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    assert stream(trainer, 1, rows).weights_sha256 == stream(make_trainer(**settings), 1, rows).weights_sha256
