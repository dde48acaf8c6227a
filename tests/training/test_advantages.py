"""Group advantages against values worked out by hand in float64."""

import math

import pytest
import torch

from gpu_workers.training.advantages import DEVIATION_FLOOR, equal_rewards, group_advantages


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
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, 1e9])
def test_equal_rewards_give_exact_zeros_whatever_their_mean_rounds_to(divide: bool, reward: float) -> None:
    rewards = torch.full((2, 7), reward, dtype=torch.float64)
    assert torch.equal(group_advantages(rewards, divide_by_standard_deviation=divide), torch.zeros_like(rewards))
    assert equal_rewards(rewards).all()


def test_a_group_with_one_other_reward_carries_signal() -> None:
    assert equal_rewards(torch.tensor([[0.1, 0.1], [0.1, 0.2]])).tolist() == [True, False]


def test_each_group_has_its_own_baseline() -> None:
    both = torch.tensor([[1.0, 0.0], [10.0, 20.0]], dtype=torch.float64)
    alone = [group_advantages(row.unsqueeze(0), divide_by_standard_deviation=True)[0] for row in both]
    assert torch.equal(group_advantages(both, divide_by_standard_deviation=True), torch.stack(alone))
