"""One optimizer step: against a plain float64 computation, and what may and may not change its result."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from storage.errors import BrokenInvariant, StepOutOfOrder
from storage.schemas import TRAINING_ROWS


def with_columns(batch: pa.RecordBatch, **columns: list[Any]) -> pa.RecordBatch:
    rows = [
        {**row, **{name: values[index] for name, values in columns.items()}}
        for index, row in enumerate(batch.to_pylist())
    ]
    return pa.RecordBatch.from_pylist(rows, schema=TRAINING_ROWS)


def plain_step(model_dir: Any, batches: list[pa.RecordBatch], *, temperature: float = 1.0) -> dict[str, float]:
    """The same loss in float64, row by row without padding, with everything written out."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager").eval()
    losses, log_ratios, entropies = [], [], []
    for batch in batches:
        rewards = batch.column("reward").to_pylist()
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for row in batch.to_pylist():
            if row["masked"] or deviation == 0:
                continue
            advantage = (row["reward"] - mean) / (deviation + 1e-6)
            logits = model(input_ids=torch.tensor([row["token_ids"]])).logits[0] / temperature
            for position, token in enumerate(row["token_ids"]):
                if not row["loss_mask"][position]:
                    continue
                distribution = torch.log_softmax(logits[position - 1], dim=-1)
                log_ratio = distribution[token] - row["logprobs"][position]
                ratio = log_ratio.exp()
                weight = ratio if ratio.item() <= 2 else 2 * (1 + torch.log(ratio / 2))
                losses.append(-torch.minimum(weight * advantage, ratio.clamp(0.8, 1.28) * advantage))
                log_ratios.append(log_ratio.item())
                entropies.append(-(distribution.exp() * distribution).sum().item())
    loss = torch.stack(losses).mean()
    loss.backward()
    squares = sum((parameter.grad**2).sum().item() for parameter in model.parameters())
    count = len(losses)
    return {
        "loss": loss.item(),
        "gradient_norm": math.sqrt(squares),
        "tokens": count,
        "entropy": sum(entropies) / count,
        "importance_ratio_mean": sum(math.exp(r) for r in log_ratios) / count,
        "importance_ratio_max": math.exp(max(log_ratios)),
        "kl_k1": -sum(log_ratios) / count,
        "kl_k3": sum(math.exp(r) - 1 - r for r in log_ratios) / count,
        "logprob_mismatch_mean": sum(abs(r) for r in log_ratios) / count,
        "logprob_mismatch_max": max(abs(r) for r in log_ratios),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_step_is_the_token_mean_loss_of_a_plain_computation(
    model_dir: Any, make_trainer: Any, make_rows: Any, run_step: Any, temperature: float
) -> None:
    rows = make_rows(groups=4)
    rows[1] = with_columns(rows[1], masked=[False, True, False, False])
    rows[2] = with_columns(rows[2], reward=[0.25] * 4)
    trainer = make_trainer(sections={"generation": {"temperature": temperature}})
    result = run_step(trainer, 1, rows)
    for name, expected in plain_step(model_dir, rows, temperature=temperature).items():
        assert result.metrics[name] == pytest.approx(expected, rel=2e-4, abs=1e-6), name
    assert result.metrics["groups"] == 4
    assert result.metrics["equal_reward_groups"] == 1
    assert result.metrics["masked_rows"] == 1
    assert result.metrics["reward"] == pytest.approx(
        sum(r for batch in rows for r in batch.column("reward").to_pylist()) / 16
    )


def test_calls_may_cut_a_step_anywhere_without_changing_a_bit(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    rows = make_rows(groups=5)
    hashes = {
        run_step(make_trainer(), 1, *calls).weights_sha256
        for calls in ([rows], [rows[:1], rows[1:]], [[batch] for batch in rows], [rows[:3], rows[3:4], rows[4:]])
    }
    assert len(hashes) == 1


def test_another_order_of_rows_is_another_computation_but_the_same_gradient(
    make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    rows = make_rows(groups=5)
    forward = run_step(make_trainer(), 1, rows).metrics
    backward = run_step(make_trainer(), 1, rows[::-1]).metrics
    assert forward["gradient_norm"] == pytest.approx(backward["gradient_norm"], rel=1e-5)


def test_log_probabilities_do_not_depend_on_the_rows_beside_them(
    make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    trainer, rows = make_trainer(microbatch_rows=64), make_rows(groups=6)
    alone = trainer.log_probabilities(rows)
    recorded = [
        with_columns(batch, logprobs=[[0.0] * 3 + alone[4 * index + slot] for slot in range(4)])
        for index, batch in enumerate(rows)
    ]
    together = run_step(trainer, 1, recorded).metrics
    assert together["logprob_mismatch_max"] <= 1e-6
    assert together["importance_ratio_max"] == pytest.approx(1.0, abs=1e-6)


def test_groups_of_equal_rewards_and_masked_rows_change_nothing(
    make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    first, equal, last = make_rows(groups=3)
    equal = with_columns(equal, reward=[1.0] * 4)
    with_equal = run_step(make_trainer(), 1, [first, equal, last])
    without = run_step(make_trainer(), 1, [first, last])
    assert with_equal.weights_sha256 == without.weights_sha256
    assert with_equal.metrics["tokens"] == without.metrics["tokens"]


def test_a_step_without_any_signal_leaves_weights_and_optimizer_alone(
    make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    trainer = make_trainer()
    first = run_step(trainer, 1, make_rows(groups=2))
    flat = [with_columns(batch, reward=[0.5] * 4) for batch in make_rows(groups=2, seed=1)]
    second = run_step(trainer, 2, flat)
    assert second.weights_sha256 == first.weights_sha256
    assert second.metrics["tokens"] == 0
    assert second.metrics["gradient_norm"] == 0
    twin = make_trainer()
    run_step(twin, 1, make_rows(groups=2))
    third = make_rows(groups=2, seed=2)
    assert run_step(trainer, 3, third).weights_sha256 == run_step(twin, 2, third).weights_sha256


def test_rewarded_completions_become_likelier(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    trainer = make_trainer(learning_rate=1e-3)
    rows = [with_columns(batch, reward=[1.0, 0.0, 0.0, 0.0]) for batch in make_rows(groups=4)]
    before = trainer.log_probabilities(rows)
    for step in range(1, 4):
        run_step(trainer, step, rows)
    after = trainer.log_probabilities(rows)
    gains = [sum(new) - sum(old) for old, new in zip(before, after, strict=True)]
    assert all(gain > 0 for gain in gains[::4])


def test_fresh_tokens_are_those_of_the_published_version(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    trainer = make_trainer()
    assert run_step(trainer, 1, make_rows(groups=2)).metrics["fresh_tokens"] == 0
    trainer.publish_weights(1)
    stale, fresh = make_rows(groups=2, seed=1)
    fresh = with_columns(fresh, versions=[[-1, 1]] * 4)
    metrics = run_step(trainer, 2, [stale, fresh]).metrics
    assert metrics["fresh_tokens"] == sum(sum(mask) for mask in fresh.column("loss_mask").to_pylist())
    assert 0 < metrics["fresh_logprob_mismatch_max"] <= metrics["logprob_mismatch_max"]


def test_a_step_can_be_begun_again_at_any_moment(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    rows = make_rows(groups=3)
    trainer = make_trainer()
    trainer.begin_step(1)
    trainer.train_microbatch(make_rows(groups=2, seed=9))
    assert run_step(trainer, 1, rows).weights_sha256 == run_step(make_trainer(), 1, rows).weights_sha256


def test_refused_rows_leave_the_step_as_it_was(make_trainer: Any, make_rows: Any, edit_row: Any, run_step: Any) -> None:
    rows = make_rows(groups=3, seed=3)
    trainer = make_trainer()
    trainer.begin_step(1)
    trainer.train_microbatch(rows[:2])
    with pytest.raises(BrokenInvariant, match="unequal length"):
        trainer.train_microbatch([edit_row(loss_mask=[False])])
    with pytest.raises(BrokenInvariant, match="arrives twice"):
        trainer.train_microbatch(rows[1:])
    trainer.train_microbatch(rows[2:])
    assert trainer.finish_step(1).weights_sha256 == run_step(make_trainer(), 1, rows).weights_sha256


@pytest.mark.parametrize("microbatch_rows", [4, 64])
def test_a_loss_that_is_not_a_number_stops_before_the_update(
    make_trainer: Any, make_rows: Any, run_step: Any, microbatch_rows: int
) -> None:
    trainer = make_trainer(microbatch_rows=microbatch_rows)
    before = trainer.publish_weights(0)
    content = Path(before.location).read_bytes()
    weight = trainer._policy.parameters()["model.norm.weight"]
    saved = weight.detach().clone()
    weight.data.fill_(float("nan"))
    trainer.begin_step(1)
    with pytest.raises(BrokenInvariant, match="loss is not finite"):
        train_and_finish(trainer, make_rows(groups=2))
    with pytest.raises(StepOutOfOrder, match="begin it again"):
        trainer.finish_step(1)
    weight.data.copy_(saved)
    assert Path(trainer.publish_weights(0).location).read_bytes() == content
    assert run_step(trainer, 1, make_rows(groups=2)).metrics["tokens"] > 0


def train_and_finish(trainer: Any, rows: list[pa.RecordBatch]) -> None:
    trainer.train_microbatch(rows)
    trainer.finish_step(1)


def test_flushing_computes_the_rest_before_the_step_is_finished(make_trainer: Any, make_rows: Any) -> None:
    rows = make_rows(groups=4)
    whole, flushed = make_trainer(), make_trainer()
    for trainer in (whole, flushed):
        trainer.begin_step(1)
        trainer.train_microbatch(rows)
    flushed.flush_microbatches()
    assert flushed.finish_step(1).weights_sha256 == whole.finish_step(1).weights_sha256


def test_a_cap_below_the_clipping_bound_is_refused(make_trainer: Any) -> None:
    with pytest.raises(ValidationError, match=r"importance_weight_cap 1\.1 is less than 1 \+ algorithm\.clip_high"):
        make_trainer(importance_weight_cap=1.1)
