"""Token losses and scores: float64 reference values, finite differences, and the edges of clipping and truncation."""

import math

import pytest
import torch
from torch import Tensor

from gpu_workers.training.losses import clipped_policy_losses, clipped_tokens, kl_estimates, score_tokens

LOW, HIGH, CAP = 0.2, 0.28, 2.0


def losses(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    recorded = torch.linspace(-3.0, -0.5, len(log_ratio), dtype=torch.float64)
    return clipped_policy_losses(
        recorded + log_ratio, recorded, advantages, clip_low=LOW, clip_high=HIGH, importance_weight_cap=CAP
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: -A, gradient -A
        (1.1, 2.0, -2.2, -2.2),  # inside the bounds: -r·A
        (1.5, 2.0, -1.28 * 2.0, 0.0),  # good and already more likely: clipped above
        (0.5, 2.0, -1.0, -1.0),  # good and less likely: never clipped
        (0.5, -2.0, 0.8 * 2.0, 0.0),  # bad and already less likely: clipped below
        (1.5, -2.0, 3.0, 3.0),  # bad and more likely: never clipped
        (6.0, -2.0, 2.0 * 2.0 * (1 + math.log(3.0)), 4.0),  # ... but its weight is truncated at the cap
        (6.0, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_of_one_token(ratio: float, advantage: float, expected: float, gradient: float) -> None:
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = losses(log_ratio, torch.tensor([advantage], dtype=torch.float64))
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert log_ratio.grad.item() == pytest.approx(gradient, rel=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    log_ratio = torch.randn(200, dtype=torch.float64, generator=generator).requires_grad_()
    advantages = torch.randn(200, dtype=torch.float64, generator=generator)
    losses(log_ratio, advantages).sum().backward()
    step = 1e-6
    with torch.no_grad():
        slope = (losses(log_ratio + step, advantages) - losses(log_ratio - step, advantages)) / (2 * step)
    torch.testing.assert_close(log_ratio.grad, slope, rtol=1e-6, atol=1e-8)


def test_the_truncated_weight_continues_the_ratio_smoothly() -> None:
    around = torch.tensor([math.log(CAP) - 1e-9, math.log(CAP) + 1e-9], dtype=torch.float64, requires_grad=True)
    loss = losses(around, torch.tensor([-1.0, -1.0], dtype=torch.float64))
    loss.sum().backward()
    assert loss[0].item() == pytest.approx(loss[1].item(), abs=1e-8)
    assert around.grad.tolist() == pytest.approx([CAP, CAP], abs=1e-8)


def test_a_huge_ratio_gives_a_finite_loss() -> None:
    loss = losses(torch.tensor([500.0, -500.0, 500.0]).double(), torch.tensor([-1.0, -1.0, 1.0]).double())
    assert torch.isfinite(loss).all()


def test_clipped_tokens_are_those_without_gradient() -> None:
    log_ratio = torch.linspace(-1, 1, 41, dtype=torch.float64).requires_grad_()
    for sign in (1.0, -1.0):
        advantages = torch.full((41,), sign, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(losses(log_ratio, advantages).sum(), log_ratio)
        clipped = clipped_tokens(log_ratio, advantages, clip_low=LOW, clip_high=HIGH)
        assert torch.equal(gradient == 0, clipped)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_scores_are_the_tempered_softmax_over_the_whole_vocabulary(temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.5], [0.0, 0.0, -1.0]], dtype=torch.float64)
    scores = score_tokens(logits, torch.tensor([2, 0]), temperature=temperature)
    for row, token in enumerate((2, 0)):
        weights = [math.exp(value / temperature) for value in logits[row].tolist()]
        probabilities = [weight / sum(weights) for weight in weights]
        assert scores.logprobs[row].item() == pytest.approx(math.log(probabilities[token]), rel=1e-12)
        entropy = -sum(p * math.log(p) for p in probabilities)
        assert scores.entropies[row].item() == pytest.approx(entropy, rel=1e-12)


def test_scores_of_half_precision_logits_are_computed_in_float32() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([1, 2, 3])
    assert torch.equal(
        score_tokens(logits, tokens, temperature=0.7).logprobs,
        score_tokens(logits.float(), tokens, temperature=0.7).logprobs,
    )


def test_an_impossible_token_leaves_the_entropy_finite() -> None:
    scores = score_tokens(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]), temperature=1.0)
    assert scores.entropies.item() == pytest.approx(math.log(2))


def test_kl_estimates_average_to_the_divergence() -> None:
    generator, policy = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    k1, k3 = kl_estimates(policy.log() - generator.log())
    exact = (generator * (generator.log() - policy.log())).sum().item()
    assert (generator * k1).sum().item() == pytest.approx(exact, rel=1e-12)
    assert (generator * k3).sum().item() == pytest.approx(exact, rel=1e-12)
    assert (k3 >= 0).all()
