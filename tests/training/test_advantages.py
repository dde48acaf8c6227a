"""Advantages against values worked out by hand in float64."""

import math

import pytest
import torch

from gpu_workers.training.advantages import (
    DEVIATION_FLOOR,
    equal_rewards,
    generalized_advantages,
    group_advantages,
    standardized,
)


def test_advantages_are_deviations_from_the_group_mean_in_sample_deviations() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    deviation = math.sqrt((0.25 + 0.25) / 3) + DEVIATION_FLOOR
    expected = torch.tensor([[0.5 / deviation, -0.5 / deviation, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(
        group_advantages(rewards, divide_by_standard_deviation=True), expected, rtol=1e-14, atol=0
    )


def test_without_the_division_advantages_are_in_reward_units() -> None:
    rewards = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    expected = torch.tensor([[2.0, -1.0, -1.0], [-1.0, 0.0, 1.0]], dtype=torch.float64)
    assert torch.equal(group_advantages(rewards, divide_by_standard_deviation=False), expected)


@pytest.mark.parametrize("divide", [True, False])
def test_leaving_one_out_compares_with_the_mean_of_the_others(divide: bool) -> None:
    rewards = [0.9, 0.1, 0.4, 0.4, 1.0]
    mean = sum(rewards) / 5
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4) + DEVIATION_FLOOR if divide else 1.0
    expected = [(r - (sum(rewards) - r) / 4) / deviation for r in rewards]
    found = group_advantages(
        torch.tensor([rewards], dtype=torch.float64), divide_by_standard_deviation=divide, baseline="leave_one_out"
    )
    assert found[0].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, 1e9])
def test_equal_rewards_give_exact_zeros_whatever_their_mean_rounds_to(divide: bool, reward: float) -> None:
    rewards = torch.full((2, 7), reward, dtype=torch.float64)
    for baseline in ("group_mean", "leave_one_out"):
        found = group_advantages(rewards, divide_by_standard_deviation=divide, baseline=baseline)
        assert torch.equal(found, torch.zeros_like(rewards))
    assert equal_rewards(rewards).all()


def test_a_group_with_one_other_reward_carries_signal() -> None:
    assert equal_rewards(torch.tensor([[0.1, 0.1], [0.1, 0.2]])).tolist() == [True, False]


def test_each_group_has_its_own_baseline() -> None:
    both = torch.tensor([[1.0, 0.0], [10.0, 20.0]], dtype=torch.float64)
    alone = [group_advantages(row.unsqueeze(0), divide_by_standard_deviation=True)[0] for row in both]
    assert torch.equal(group_advantages(both, divide_by_standard_deviation=True), torch.stack(alone))


def summed_surprises(
    rewards: list[float], values: list[float], final: float, *, gamma: float, gae_lambda: float
) -> list[float]:
    """A_t = Σ_k (γλ)^k δ_{t+k}, written out."""
    following = [*values[1:], final]
    surprises = [r + gamma * after - before for r, after, before in zip(rewards, following, values, strict=True)]
    steps = range(len(rewards))
    return [sum((gamma * gae_lambda) ** (k - t) * surprises[k] for k in steps if k >= t) for t in steps]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0), (0.0, 1.0)])
def test_generalized_advantages_are_discounted_sums_of_surprises(gamma: float, gae_lambda: float) -> None:
    random = torch.Generator().manual_seed(4)
    lengths = [6, 1, 3, 6]
    rewards, values = (torch.randn(4, 6, generator=random, dtype=torch.float64) for _ in range(2))
    final = torch.tensor([0.0, 0.7, 0.0, -0.4], dtype=torch.float64)
    found = generalized_advantages(rewards, values, torch.tensor(lengths), final, gamma=gamma, gae_lambda=gae_lambda)
    for row, length in enumerate(lengths):
        expected = summed_surprises(
            rewards[row, :length].tolist(),
            values[row, :length].tolist(),
            final[row].item(),
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
        assert found[row, :length].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert found[row, length:].tolist() == [0.0] * (6 - length)


def test_with_lambda_1_an_advantage_is_the_rest_of_the_episode_minus_the_value() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.3, 0.5, 0.9]], dtype=torch.float64)
    ended, lengths = torch.zeros(1, dtype=torch.float64), torch.tensor([3])
    found = generalized_advantages(rewards, values, lengths, ended, gamma=1.0, gae_lambda=1.0)
    assert found[0].tolist() == pytest.approx([0.7, 0.5, 0.1])
    cut_off = generalized_advantages(rewards, values, lengths, ended + 0.2, gamma=1.0, gae_lambda=1.0)
    assert cut_off[0].tolist() == pytest.approx([0.9, 0.7, 0.3])


def test_standardized_advantages_have_the_given_mean_and_deviation_removed() -> None:
    advantages = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    found = standardized(advantages, mean=3.0, deviation=math.sqrt(7))
    assert found.tolist() == pytest.approx([-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)], rel=1e-6)
    assert standardized(torch.zeros(2), mean=0.0, deviation=0.0).tolist() == [0.0, 0.0]
