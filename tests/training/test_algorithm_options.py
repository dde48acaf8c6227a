"""Each option of GRPO through the real trainer, against the same loss written out in float64, row by row."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.schemas import TRAINING_ROWS

CLIP_LOW, CLIP_HIGH, CAP = 0.2, 0.28, 2.0

OPTIONS: list[dict[str, Any]] = [
    {},
    {"loss_normalization": "sequence_mean"},
    {"loss_normalization": "constant_length", "divide_by_standard_deviation": False},
    {"loss_normalization": "constant_length", "normalization_length": 7},
    {"baseline": "leave_one_out", "divide_by_standard_deviation": False},
    {"mask_truncated": True},
    {"filter_equal_rewards": False},
    {"filter_equal_rewards": False, "kl_coefficient": 0.3, "loss_normalization": "sequence_mean"},
    {"kl_coefficient": 0.2, "kl_estimator": "k1"},
    {"kl_coefficient": 0.2, "kl_estimator": "k2"},
    {"kl_coefficient": 0.2, "kl_estimator": "k3"},
    {"entropy_coefficient": 0.05},
    {"importance_correction": "none"},
    {"clip_reference": "trainer"},
    {"clip_reference": "trainer", "importance_correction": "sequence"},
    {"clip_reference": "trainer", "importance_correction": "none"},
]


def named(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items()) or "defaults"


def changed(batch: pa.RecordBatch, **columns: list[Any]) -> pa.RecordBatch:
    rows = [
        {**row, **{name: values[index] for name, values in columns.items()}}
        for index, row in enumerate(batch.to_pylist())
    ]
    return pa.RecordBatch.from_pylist(rows, schema=TRAINING_ROWS)


def load(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager").eval()


def advantages_of(rewards: list[float], options: dict[str, Any]) -> list[float]:
    size, mean = len(rewards), sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (size - 1)) + 1e-6
    others = [(sum(rewards) - r) / (size - 1) for r in rewards]
    baselines = others if options.get("baseline") == "leave_one_out" else [mean] * size
    divisor = deviation if options.get("divide_by_standard_deviation", True) else 1.0
    return [(r - b) / divisor for r, b in zip(rewards, baselines, strict=True)]


def token_loss(logprob: Any, recorded: float, ratio_of_row: float, advantage: float, options: dict[str, Any]) -> Any:
    correction = options.get("importance_correction", "token")
    if options.get("clip_reference") == "trainer":
        disagreement = ratio_of_row if correction == "sequence" else math.exp(logprob.item() - recorded)
        weight = 1.0 if correction == "none" else min(disagreement, CAP)
        return -weight * (logprob - logprob.item()).exp() * advantage
    ratio = (logprob - recorded).exp()
    truncated = correction == "token" and ratio.item() > CAP
    weight = CAP * (1 + torch.log(ratio / CAP)) if truncated else ratio
    return -torch.minimum(weight * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)


def penalty(distance: Any, estimator: str) -> Any:
    half_square = distance**2 / 2
    if estimator == "k1":
        return distance.item() + half_square - half_square.item()
    return half_square if estimator == "k2" else torch.exp(-distance) - 1 + distance


def row_losses(model: Any, frozen: Any, row: dict[str, Any], advantage: float, options: dict[str, Any]) -> list[Any]:
    token_ids = torch.tensor([row["token_ids"]])
    logprobs = model(input_ids=token_ids).logits[0].log_softmax(-1)
    with torch.no_grad():
        others = frozen(input_ids=token_ids).logits[0].log_softmax(-1)
    positions = [p for p, sampled in enumerate(row["loss_mask"]) if sampled]
    taken = [logprobs[p - 1, row["token_ids"][p]] for p in positions]
    ratio_of_row = math.exp(sum(t.item() - row["logprobs"][p] for t, p in zip(taken, positions, strict=True)))
    losses = []
    for position, logprob in zip(positions, taken, strict=True):
        loss = token_loss(logprob, row["logprobs"][position], ratio_of_row, advantage, options)
        distance = logprob - others[position - 1, row["token_ids"][position]]
        loss = loss + options.get("kl_coefficient", 0.0) * penalty(distance, options.get("kl_estimator", "k3"))
        entropy = -(logprobs[position - 1].exp() * logprobs[position - 1]).sum()
        losses.append(loss - options.get("entropy_coefficient", 0.0) * entropy)
    return losses


def plain_step(model: Any, frozen: Any, batches: list[pa.RecordBatch], options: dict[str, Any]) -> dict[str, float]:
    rows: list[list[Any]] = []
    for batch in batches:
        rewards = batch.column("reward").to_pylist()
        if len(set(rewards)) == 1 and options.get("filter_equal_rewards", True):
            continue
        for row, advantage in zip(batch.to_pylist(), advantages_of(rewards, options), strict=True):
            left_out = options.get("mask_truncated") and row["finish_reason"] == "length"
            if not row["masked"] and not left_out:
                rows.append(row_losses(model, frozen, row, advantage, options))
    match options.get("loss_normalization", "token_mean"):
        case "token_mean":
            loss = torch.stack([loss for row in rows for loss in row]).mean()
        case "sequence_mean":
            loss = torch.stack([torch.stack(row).mean() for row in rows]).mean()
        case _:
            length = options.get("normalization_length", 16)  # generation.max_new_tokens
            loss = torch.stack([torch.stack(row).sum() / length for row in rows]).mean()
    loss.backward()
    squares = sum((parameter.grad**2).sum().item() for parameter in model.parameters())
    return {"loss": loss.item(), "gradient_norm": math.sqrt(squares), "tokens": sum(len(row) for row in rows)}


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_an_option_is_the_loss_of_a_plain_computation(
    model_dir: Path, make_model: Any, make_trainer: Any, make_rows: Any, run_step: Any, options: dict[str, Any]
) -> None:
    """The policy is first moved away from the initial model, so that the reference differs from it."""
    rows = make_rows(groups=4)
    rows[1] = changed(rows[1], masked=[False, True, False, False], finish_reason=["stop", "length", "length", "stop"])
    rows[2] = changed(rows[2], reward=[0.25] * 4)
    trainer, model = make_trainer(**options), load(model_dir)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in trainer._policy.parameters().items():
            value.add_(0.1 * torch.randn(value.shape, generator=random))
            model.get_parameter(name).copy_(value)
    metrics = run_step(trainer, 1, rows).metrics
    expected = plain_step(model, load(model_dir), rows, options)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=3e-4, abs=1e-6), name


def test_every_option_changes_the_gradient(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    """No option is accepted and then ignored. (k1 has k2's gradient on purpose.) Some ratios lie above the cap."""
    lower = [[[v - 0.7 for v in row] for row in b.column("logprobs").to_pylist()] for b in make_rows(groups=4)]
    rows = [changed(batch, logprobs=values) for batch, values in zip(make_rows(groups=4), lower, strict=True)]
    rows[1] = changed(rows[1], finish_reason=["length"] * 4)
    rows[2] = changed(rows[2], reward=[0.25] * 4)
    found: dict[str, str] = {}
    for options in OPTIONS:
        trainer = make_trainer(**options)
        with torch.no_grad():
            trainer._policy.parameters()["model.norm.weight"].mul_(5.0)
        found.setdefault(run_step(trainer, 1, rows).weights_sha256, named(options))
    missing = {named(options) for options in OPTIONS} - set(found.values())
    assert missing == {named({"kl_coefficient": 0.2, "kl_estimator": "k2"})}


def test_masked_completions_still_count_in_the_baseline(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    rows = [changed(batch, finish_reason=["length", "stop", "stop", "stop"]) for batch in make_rows(groups=2)]
    metrics = run_step(make_trainer(mask_truncated=True), 1, rows).metrics
    assert (metrics["masked_rows"], metrics["truncated_rows"], metrics["trained_rows"]) == (2, 2, 6)
    better = [changed(batch, reward=[9.0, *batch.column("reward").to_pylist()[1:]]) for batch in rows]
    assert run_step(make_trainer(mask_truncated=True), 1, better).metrics["loss"] != metrics["loss"]


def test_the_reference_stays_the_initial_model(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    trainer = make_trainer(kl_coefficient=0.1)
    distances = [run_step(trainer, step, make_rows(groups=3)).metrics["reference_kl"] for step in range(1, 5)]
    assert distances[0] == pytest.approx(0.0, abs=1e-6)
    assert distances[-1] > 1e-4
    assert "reference_kl" not in run_step(make_trainer(), 1, make_rows(groups=3)).metrics


def test_a_strong_penalty_holds_the_policy_near_the_initial_model(
    make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    def distance(coefficient: float) -> float:
        trainer = make_trainer(kl_coefficient=coefficient, learning_rate=3e-3)
        metrics: dict[str, float] = {}
        for step in range(1, 9):
            metrics = run_step(trainer, step, make_rows(groups=3)).metrics
        return metrics["reference_kl"]

    assert distance(5.0) < 0.5 * distance(1e-6)


def test_an_entropy_bonus_keeps_the_policy_more_random(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    def entropy(coefficient: float) -> float:
        trainer = make_trainer(entropy_coefficient=coefficient, learning_rate=3e-3)
        with torch.no_grad():
            trainer._policy.parameters()["model.norm.weight"].mul_(5.0)
        return [run_step(trainer, step, make_rows(groups=3)).metrics for step in range(1, 9)][-1]["entropy"]

    assert entropy(1.0) > entropy(0.0) + 0.01


@pytest.mark.parametrize("options", [{}, {"clip_reference": "trainer", "importance_correction": "sequence"}])
def test_several_epochs_and_minibatches_do_not_depend_on_how_calls_cut_rows(
    make_trainer: Any, make_rows: Any, run_step: Any, options: dict[str, Any]
) -> None:
    rows = make_rows(groups=5)
    hashes = set()
    for calls in ([rows], [rows[:1], rows[1:]], [[batch] for batch in rows]):
        result = run_step(make_trainer(num_epochs=2, num_minibatches=3, **options), 1, *calls)
        assert result.metrics["updates"] == 6
        hashes.add(result.weights_sha256)
    assert len(hashes) == 1
    assert run_step(make_trainer(**options), 1, rows).weights_sha256 not in hashes


def test_an_epoch_of_one_minibatch_measures_what_a_single_update_does(
    make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    """With a learning rate of nothing the second epoch repeats the first."""
    rows = make_rows(groups=4)
    once = run_step(make_trainer(), 1, rows)
    trainer = make_trainer(num_epochs=2, learning_rate=1e-12)
    twice = run_step(trainer, 1, rows)
    for name in ("loss", "gradient_norm", "entropy", "kl_k3", "tokens"):
        assert twice.metrics[name] == pytest.approx(once.metrics[name], rel=1e-5), name


def test_clipping_acts_in_later_epochs(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    """Measured against the trainer's own start, the first update has ratio 1 everywhere and clips nothing."""
    rows = make_rows(groups=4)
    settings = {"clip_reference": "trainer", "importance_correction": "none"}
    assert run_step(make_trainer(**settings), 1, rows).metrics["clip_fraction"] == 0
    assert run_step(make_trainer(num_epochs=4, **settings), 1, rows).metrics["clip_fraction"] > 0.05
