"""KL penalty, importance weights, normalization, entropy bonus and value loss: reference values, exact expectations and
finite differences in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu_workers.training.losses import (
    LINEAR_ABOVE,
    clipped_values,
    importance_weights,
    kl_penalties,
    loss_denominator,
    score_tokens,
    token_weights,
    value_losses,
)

ESTIMATORS = ("k1", "k2", "k3")


def slope(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Elementwise central differences of a function of single elements."""
    with torch.no_grad():
        return (function(at + step) - function(at - step)) / (2 * step)


def distributions() -> tuple[Tensor, Tensor]:
    """Logits of a policy and log-probabilities of a reference over five tokens."""
    random = torch.Generator().manual_seed(8)
    logits = torch.randn(5, generator=random, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(5, generator=random, dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_penalties_of_single_tokens(estimator: str) -> None:
    for distance in (-1.5, -0.1, 0.0, 0.3, 2.0):
        expected = {"k1": distance, "k2": distance**2 / 2, "k3": math.exp(-distance) - 1 + distance}[estimator]
        logprobs = torch.tensor([-1.0 + distance], dtype=torch.float64)
        found = kl_penalties(logprobs, torch.tensor([-1.0], dtype=torch.float64), estimator=estimator)
        assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_the_mean_penalty_is_the_divergence(estimator: str, unbiased: bool) -> None:
    logits, reference = distributions()
    logprobs = logits.detach().log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum().item()
    mean = (logprobs.exp() * kl_penalties(logprobs, reference, estimator=estimator)).sum().item()
    assert (mean == pytest.approx(exact, rel=1e-12)) == unbiased


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_mean_gradient_of_a_penalty_is_that_of_a_divergence(estimator: str) -> None:
    """k1 and k2: KL(policy || reference); k3: KL(reference || policy). Tokens are drawn from a fixed policy."""
    logits, reference = distributions()
    logprobs = logits.log_softmax(-1)
    drawn = logprobs.detach().exp()
    (found,) = torch.autograd.grad((drawn * kl_penalties(logprobs, reference, estimator=estimator)).sum(), logits)
    again = logits.log_softmax(-1)
    forward = (reference.exp() * (reference - again)).sum()
    divergence = forward if estimator == "k3" else (again.exp() * (again - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_of_penalties_agree_with_finite_differences(estimator: str) -> None:
    reference = torch.full((101,), -2.0, dtype=torch.float64)
    logprobs = torch.linspace(-6.0, 0.0, 101, dtype=torch.float64).requires_grad_()
    kl_penalties(logprobs, reference, estimator=estimator).sum().backward()
    shown_by = "k2" if estimator == "k1" else estimator  # k1 is given k2's gradient on purpose

    def penalty(at: Tensor) -> Tensor:
        return kl_penalties(at, reference, estimator=shown_by)

    torch.testing.assert_close(logprobs.grad, slope(penalty, logprobs.detach()), rtol=1e-6, atol=1e-8)


def test_a_token_that_the_policy_has_lost_is_pulled_back_with_a_finite_force() -> None:
    logprobs = torch.tensor([-400.0, -30.0], requires_grad=True)
    penalty = kl_penalties(logprobs, torch.zeros(2), estimator="k3")
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    assert logprobs.grad.tolist() == pytest.approx([1 - math.exp(LINEAR_ABOVE)] * 2, rel=1e-5)


def test_importance_weights_of_tokens_are_truncated_ratios() -> None:
    log_ratio = torch.tensor([math.log(r) for r in (0.25, 1.0, 1.9, 7.0)], dtype=torch.float64)
    rows = torch.tensor([0, 0, 1, 1])
    weights, truncated = importance_weights(log_ratio, rows, num_rows=2, per_sequence=False, cap=2.0)
    assert weights.tolist() == pytest.approx([0.25, 1.0, 1.9, 2.0], rel=1e-12)
    assert truncated.tolist() == [False, False, False, True]


def test_importance_weights_of_sequences_are_truncated_products() -> None:
    log_ratio = torch.tensor([math.log(r) for r in (0.5, 1.2, 3.0, 0.9, 1.1)], dtype=torch.float64)
    rows = torch.tensor([0, 0, 1, 1, 1])
    weights, truncated = importance_weights(log_ratio, rows, num_rows=2, per_sequence=True, cap=2.5)
    assert weights.tolist() == pytest.approx([0.6, 0.6, 2.5, 2.5, 2.5], rel=1e-12)
    assert truncated.tolist() == [False, False, True, True, True]


def test_importance_weights_have_no_gradient_and_never_overflow() -> None:
    log_ratio = torch.tensor([300.0, -300.0], requires_grad=True)
    weights, _ = importance_weights(log_ratio, torch.tensor([0, 1]), num_rows=2, per_sequence=True, cap=2.0)
    assert not weights.requires_grad
    assert weights.tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 4) / 4),
        ("sequence_mean", ((1 + 2 + 3) / 3 + 4) / 2),
        ("constant_length", (1 + 2 + 3 + 4) / 8 / 2),
    ],
)
def test_losses_of_two_rows_are_normalized_as_their_name_says(normalization: str, expected: float) -> None:
    losses, rows = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 0, 1])
    weights = token_weights(torch.tensor([3, 1]), rows, normalization=normalization, constant_length=8)
    denominator = loss_denominator(num_tokens=4, num_rows=2, normalization=normalization)
    assert (losses * weights).sum().item() / denominator == pytest.approx(expected)


def test_the_entropy_bonus_has_the_gradient_of_the_entropy() -> None:
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()

    def entropy(at: Tensor) -> Tensor:
        return score_tokens(at, torch.tensor([1]), temperature=0.7, entropy_gradient=True).entropies

    entropy(logits).sum().backward()
    for token in range(6):
        step = torch.zeros_like(logits)
        step[0, token] = 1e-6
        with torch.no_grad():
            expected = (entropy(logits + step) - entropy(logits - step)).item() / 2e-6
        assert logits.grad[0, token].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    plain = score_tokens(logits, torch.tensor([1]), temperature=0.7).entropies
    assert not plain.requires_grad
    assert plain.item() == pytest.approx(entropy(logits).item(), rel=1e-12)


def test_an_impossible_token_leaves_the_gradient_of_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    score_tokens(logits, torch.tensor([0]), temperature=1.0, entropy_gradient=True).entropies.sum().backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("value", "expected", "gradient"),
    [
        (0.6, 0.5 * 0.4**2, -0.4),  # moved by 0.1 towards the target 1: inside the bounds
        (0.8, 0.5 * 0.3**2, 0.0),  # moved by 0.3 towards it: counted as 0.7, no gradient
        (0.2, 0.5 * 0.8**2, -0.8),  # moved away by 0.3: its own error is the larger one
        (1.6, 0.5 * 0.6**2, 0.6),  # moved past the target: pulled back
    ],
)
def test_loss_and_gradient_of_one_value(value: float, expected: float, gradient: float) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([0.5], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    loss = value_losses(values, old, returns, clip=0.2)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert values.grad.item() == pytest.approx(gradient, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("clip", [0.2, None])
def test_gradients_of_value_losses_agree_with_finite_differences(clip: float | None) -> None:
    random = torch.Generator().manual_seed(6)
    values, old, returns = (torch.randn(200, generator=random, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    value_losses(values, old, returns, clip=clip).sum().backward()

    def loss(at: Tensor) -> Tensor:
        return value_losses(at, old, returns, clip=clip)

    torch.testing.assert_close(values.grad, slope(loss, values.detach()), rtol=1e-6, atol=1e-8)
    assert torch.equal(values.grad == 0, clipped_values(values.detach(), old, returns, clip=clip))
