"""PPO through the real trainer: a step against float64, the critic's warm-up, several epochs, what stops half-way."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_workers.training.trainer_actor import TrainerActor
from storage.errors import BrokenInvariant
from storage.schemas import TRAINING_ROWS

Rows = list[pa.RecordBatch]


def changed(batch: pa.RecordBatch, **columns: list[Any]) -> pa.RecordBatch:
    rows = [
        {**row, **{name: values[index] for name, values in columns.items()}}
        for index, row in enumerate(batch.to_pylist())
    ]
    return pa.RecordBatch.from_pylist(rows, schema=TRAINING_ROWS)


@pytest.fixture
def make_ppo(make_trainer: Any) -> Callable[..., TrainerActor]:
    def make(*, critic: dict[str, Any] | None = None, **settings: Any) -> TrainerActor:
        trainer: TrainerActor = make_trainer(kind="ppo", critic=critic or {}, **settings)
        return trainer

    return make


def move_critic(trainer: TrainerActor, scale: float = 0.3) -> None:
    """Give the critic a value head that says something."""
    random = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for value in trainer._learner.critic._model.value_head.parameters():
            value.copy_(scale * torch.randn(value.shape, generator=random))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


class PlainPpo:
    """One update of one epoch in float64, row by row: values, advantages, both losses and their gradients."""

    def __init__(self, model_dir: Path, trainer: TrainerActor, *, bootstrap: bool) -> None:
        self._policy, self._critic = load(model_dir), load(model_dir).base_model
        head = trainer._learner.critic._model.value_head
        self._head = torch.nn.Linear(head.in_features, 1).double()
        self._head.load_state_dict({name: value.double() for name, value in head.state_dict().items()})
        self._bootstrap = bootstrap

    def _values(self, row: dict[str, Any]) -> Any:
        states = self._critic(input_ids=torch.tensor([row["token_ids"]])).last_hidden_state[0]
        return self._head(states)[:, 0]

    def _estimates(self, row: dict[str, Any], values: list[float], positions: list[int]) -> list[float]:
        """GAE with gamma 0.9 and lambda 0.8."""
        before = [values[p - 1] for p in positions]
        is_cut_off = self._bootstrap and row["finish_reason"] == "length"
        following = [*before[1:], values[-1] if is_cut_off else 0.0]
        rewards = [0.0] * (len(positions) - 1) + [row["reward"]]
        surprises = [r + 0.9 * a - b for r, a, b in zip(rewards, following, before, strict=True)]
        return [sum((0.9 * 0.8) ** k * s for k, s in enumerate(surprises[t:])) for t in range(len(surprises))]

    def step(self, batches: Rows, *, normalize: bool) -> dict[str, float]:
        rows = [row for batch in batches for row in batch.to_pylist() if not row["masked"]]
        sampled = [[p for p, mask in enumerate(row["loss_mask"]) if mask] for row in rows]
        values = [self._values(row) for row in rows]
        estimates = [self._estimates(r, v.tolist(), p) for r, v, p in zip(rows, values, sampled, strict=True)]
        plain = np.array([a for row in estimates for a in row])
        scaled = (plain - plain.mean()) / (plain.std(ddof=1) + 1e-6) if normalize else plain
        now = torch.cat([v[[p - 1 for p in at]] for v, at in zip(values, sampled, strict=True)])
        returns = torch.from_numpy(plain) + now.detach()
        value_loss = 0.5 * (now - returns).square().mean()
        value_loss.backward()
        taken = torch.cat([self._logprobs(row, at) for row, at in zip(rows, sampled, strict=True)])
        recorded = torch.tensor([row["logprobs"][p] for row, at in zip(rows, sampled, strict=True) for p in at])
        ratio, advantages = (taken - recorded).exp(), torch.from_numpy(scaled)
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()
        loss.backward()
        errors = (returns - now).detach()
        return {
            "loss": loss.item(),
            "value_loss": value_loss.item(),
            "gradient_norm": norm(self._policy),
            "value_gradient_norm": math.hypot(norm(self._critic), norm(self._head)),
            "tokens": len(plain),
            "advantage_mean": plain.mean(),
            "advantage_deviation": plain.std(ddof=1),
            "value_mean": now.mean().item(),
            "return_mean": returns.mean().item(),
            "explained_variance": 1 - (errors.var() / returns.var()).item(),
        }

    def _logprobs(self, row: dict[str, Any], positions: list[int]) -> Any:
        logits = self._policy(input_ids=torch.tensor([row["token_ids"]])).logits[0].log_softmax(-1)
        return torch.stack([logits[p - 1, row["token_ids"][p]] for p in positions])


def norm(module: Any) -> float:
    return math.sqrt(sum((p.grad**2).sum().item() for p in module.parameters() if p.grad is not None))


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_step_is_that_of_a_plain_computation(
    model_dir: Path, make_ppo: Any, make_rows: Any, run_step: Any, bootstrap: bool, normalize: bool
) -> None:
    rows = make_rows(groups=4)
    rows[1] = changed(rows[1], masked=[False, True, False, False], finish_reason=["length", "stop", "length", "stop"])
    rows[2] = changed(rows[2], reward=[0.25] * 4)  # no group, no baseline: equal rewards are trained as any others
    critic = {
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "normalize_advantages": normalize,
        "bootstrap_truncated": bootstrap,
        "max_gradient_norm": 1e9,
    }
    trainer = make_ppo(critic=critic, importance_correction="none")
    move_critic(trainer)
    expected = PlainPpo(model_dir, trainer, bootstrap=bootstrap).step(rows, normalize=normalize)
    metrics = run_step(trainer, 1, rows).metrics
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=3e-4, abs=1e-6), name
    assert metrics["updates"] == 2


def test_rewards_of_turns_arrive_with_the_last_sampled_token(
    model_dir: Path, make_ppo: Any, edit_row: Any, run_step: Any
) -> None:
    """What the environment says in between takes no step of its own."""
    rows = [
        edit_row(
            token_ids=[1, 2, 3, 4, 5, 6],
            loss_mask=[False, True, False, False, True, False],
            logprobs=[0.0, -3.0, 0.0, 0.0, -3.2, 0.0],
            version_starts=[0, 1, 2, 4, 5],
            versions=[-1, 0, -1, 0, -1],
        )
    ]
    critic = {"gamma": 0.9, "gae_lambda": 0.8, "normalize_advantages": False, "max_gradient_norm": 1e9}
    trainer = make_ppo(critic=critic, importance_correction="none")
    move_critic(trainer)
    expected = PlainPpo(model_dir, trainer, bootstrap=False).step(rows, normalize=False)
    metrics = run_step(trainer, 1, rows).metrics
    for name in ("loss", "value_loss", "return_mean", "advantage_deviation"):
        assert metrics[name] == pytest.approx(expected[name], rel=3e-4, abs=1e-6), name


def test_calls_may_cut_a_step_anywhere_without_changing_a_bit(make_ppo: Any, make_rows: Any, run_step: Any) -> None:
    rows, found = make_rows(groups=5), set()
    for calls in ([rows], [rows[:1], rows[1:]], [[batch] for batch in rows], [rows[:3], rows[3:4], rows[4:]]):
        trainer = make_ppo(num_epochs=2, num_minibatches=3)
        move_critic(trainer)
        result = run_step(trainer, 1, *calls)
        critic = next(e["sha256"] for e in trainer.save("run/checkpoints/x") if e["role"] == "value_weights")
        found.add((result.weights_sha256, critic))
    assert len(found) == 1


def test_nothing_changes_before_the_step_is_finished(make_ppo: Any, make_rows: Any) -> None:
    trainer = make_ppo(num_epochs=2)
    move_critic(trainer)

    def everything() -> dict[str, torch.Tensor]:
        learner = trainer._learner
        tensors = {**learner.policy.tensors(), **learner.critic.tensors(), **learner.optimizer.tensors()}
        return {name: value.clone() for name, value in {**tensors, **learner.critic.optimizer.tensors()}.items()}

    before = everything()
    trainer.begin_step(1)
    trainer.train_microbatch(make_rows(groups=4))
    trainer.flush_microbatches()
    assert all(torch.equal(value, before[name]) for name, value in everything().items())
    result = trainer.finish_step(1)
    assert trainer.finish_step(1) == result
    assert not all(torch.equal(value, before[name]) for name, value in everything().items())


def test_a_prompt_may_be_answered_once(make_ppo: Any, make_rows: Any, run_step: Any) -> None:
    rows = [batch.slice(0, 1) for batch in make_rows(groups=6)]
    metrics = run_step(make_ppo(num_generations_per_prompt=1), 1, rows).metrics
    assert (metrics["rows"], metrics["trained_rows"], metrics["equal_reward_groups"]) == (6, 6, 0)
    assert metrics["gradient_norm"] > 0


def test_a_step_without_trained_rows_leaves_everything_alone(make_ppo: Any, make_rows: Any, run_step: Any) -> None:
    trainer = make_ppo(num_epochs=2, num_minibatches=2)
    first = run_step(trainer, 1, make_rows(groups=2))
    second = run_step(trainer, 2, [changed(batch, masked=[True] * 4) for batch in make_rows(groups=2, seed=1)])
    assert second.weights_sha256 == first.weights_sha256
    assert (second.metrics["updates"], second.metrics["tokens"], second.metrics["value_loss"]) == (0, 0, 0)


def test_during_the_warm_up_only_the_critic_is_trained(make_ppo: Any, make_rows: Any, run_step: Any) -> None:
    trainer = make_ppo(policy_training_start_step=2, num_epochs=2, critic={"learning_rate": 3e-3})
    initial = trainer.publish_weights(0)
    content = Path(initial.location).read_bytes()
    results = [run_step(trainer, step, make_rows(groups=4)) for step in (1, 2, 3)]
    hashes = [result.weights_sha256 for result in results]
    assert hashes[0] == hashes[1] != hashes[2]
    assert [result.metrics["critic_warmup"] for result in results] == [1, 1, 0]
    assert [result.metrics["updates"] for result in results] == [2, 2, 4]
    losses = [result.metrics["value_loss"] for result in results]
    assert losses[0] > losses[1] > losses[2]
    assert results[0].metrics["gradient_norm"] == 0
    assert results[0].metrics["entropy"] > 0
    restarted = make_ppo(policy_training_start_step=2)
    run_step(restarted, 1, make_rows(groups=4))
    assert Path(restarted.publish_weights(1).location).read_bytes() == content


def test_the_critic_may_have_epochs_of_its_own(make_ppo: Any, make_rows: Any, run_step: Any) -> None:
    rows = make_rows(groups=3)
    assert run_step(make_ppo(critic={"num_epochs": 3}), 1, rows).metrics["updates"] == 4
    assert run_step(make_ppo(num_epochs=3, critic={"num_epochs": 1}), 1, rows).metrics["updates"] == 4
    assert run_step(make_ppo(num_epochs=3), 1, rows).metrics["updates"] == 6


def test_the_critic_learns_what_it_can_know(make_ppo: Any, make_rows: Any, run_step: Any) -> None:
    """All tokens of a row are the same, and which one it is tells the reward."""
    trainer = make_ppo(
        policy_training_start_step=50, critic={"learning_rate": 3e-3, "value_clip": None, "gae_lambda": 1.0}
    )
    explained = []
    for step in range(1, 31):
        rows = []
        for batch in make_rows(groups=8, seed=step):
            tokens = [[ids[0]] * len(ids) for ids in batch.column("token_ids").to_pylist()]
            rows.append(changed(batch, token_ids=tokens, reward=[float(ids[0] < 12) for ids in tokens]))
        explained.append(run_step(trainer, step, rows).metrics["explained_variance"])
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # the value head starts at zero
    assert explained[-1] > 0.9


def test_rewarded_completions_become_likelier(make_ppo: Any, make_rows: Any, run_step: Any) -> None:
    trainer = make_ppo(learning_rate=1e-3)
    rows = [changed(batch, reward=[1.0, 0.0, 0.0, 0.0]) for batch in make_rows(groups=4)]
    before = trainer.log_probabilities(rows)
    for step in range(1, 4):
        run_step(trainer, step, rows)
    after = trainer.log_probabilities(rows)
    gains = [sum(new) - sum(old) for old, new in zip(before, after, strict=True)]
    assert all(gain > 0 for gain in gains[::4])


def test_values_are_clipped_when_they_run_away_from_those_before_the_step(
    make_ppo: Any, make_rows: Any, run_step: Any
) -> None:
    critic = {"value_clip": 0.01, "learning_rate": 1e-2, "num_epochs": 6}
    clipped = run_step(make_ppo(critic=critic), 1, make_rows(groups=4)).metrics["value_clip_fraction"]
    free = run_step(make_ppo(critic={**critic, "value_clip": None}), 1, make_rows(groups=4)).metrics
    assert clipped > 0.1
    assert free["value_clip_fraction"] == 0


def test_a_step_that_failed_before_its_first_update_can_be_begun_again(
    make_ppo: Any, make_rows: Any, run_step: Any
) -> None:
    trainer, rows = make_ppo(), make_rows(groups=3)
    norm_weight = trainer._policy.parameters()["model.norm.weight"]
    saved = norm_weight.detach().clone()
    norm_weight.data.fill_(float("nan"))
    trainer.begin_step(1)
    trainer.train_microbatch(rows)
    with pytest.raises(BrokenInvariant, match="the loss is not finite"):
        trainer.finish_step(1)
    norm_weight.data.copy_(saved)
    assert run_step(trainer, 1, rows).weights_sha256 == run_step(make_ppo(), 1, rows).weights_sha256


def test_a_step_that_failed_between_its_updates_needs_a_restore(make_ppo: Any, make_rows: Any, run_step: Any) -> None:
    """The policy's update is made, the critic's is not: what is in memory belongs to no step and is never saved."""
    trainer, rows = make_ppo(), make_rows(groups=3)
    files = trainer.save("run/checkpoints/step_000000")
    trainer.begin_step(1)
    trainer.train_microbatch(rows)
    trainer.flush_microbatches()
    trainer._learner.critic.parameters()["value_head.weight"].data.fill_(float("nan"))
    with pytest.raises(BrokenInvariant, match="the critic's loss is not finite"):
        trainer.finish_step(1)
    for forbidden in (
        lambda: trainer.begin_step(1),
        lambda: trainer.save("run/checkpoints/step_000001"),
        lambda: trainer.publish_weights(1),
    ):
        with pytest.raises(BrokenInvariant, match="between two of its updates"):
            forbidden()
    trainer.restore(files)
    assert run_step(trainer, 1, rows).weights_sha256 == run_step(make_ppo(), 1, rows).weights_sha256
