"""Advantages: how much better a completion is than the others of its prompt, or than the critic expected."""

import torch
from torch import Tensor

from storage.algorithm_config import Baseline

DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation, in reward units, so that rounding noise is not blown up to unit size."""


def group_advantages(
    rewards: Tensor, *, divide_by_standard_deviation: bool, baseline: Baseline = "group_mean"
) -> Tensor:
    """Rewards minus their group's baseline, by choice divided by their group's sample standard deviation.

    `rewards` has shape [groups, generations] (floating point; float64 keeps all digits); the result has the same
    shape and type. All completions of a group belong to its baseline, also those masked from the loss. A group whose
    rewards are all equal gets exact zeros, whatever the rounding of its mean. The baseline is the mean of the group,
    or, with 'leave_one_out', that of its other members: it doesn't depend on the completion itself, so that the
    gradient stays unbiased; A_i = N / (N - 1) · (r_i - mean(r)).

    Sources: group-relative advantages, DeepSeekMath (arXiv:2402.03300), section 4.1.2,
    A_i = (r_i - mean(r)) / std(r); without the division, Dr. GRPO (arXiv:2503.20783); leave-one-out, RLOO
    (arXiv:2402.14740), section 2.3.
    """
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    if baseline == "leave_one_out":
        size = rewards.shape[-1]
        centred = centred * (size / (size - 1))
    if divide_by_standard_deviation:
        centred = centred / (rewards.std(dim=-1, keepdim=True, correction=1) + DEVIATION_FLOOR)
    return centred.masked_fill(equal_rewards(rewards).unsqueeze(-1), 0.0)


def equal_rewards(rewards: Tensor) -> Tensor:
    """Which groups carry no signal: [groups, generations] -> bool [groups]."""
    return rewards.amax(dim=-1) == rewards.amin(dim=-1)


def generalized_advantages(
    rewards: Tensor, values: Tensor, lengths: Tensor, final_values: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalized advantage estimates of every sampled token of R rows, the longest with S of them.

    `rewards` [R, S]: what token t earned; `values` [R, S]: the critic's value of the state before token t; `lengths`
    int64 [R]: sampled tokens of each row, which come first; `final_values` [R]: value of the state after the last
    one, 0 where the episode ended. One floating type. The result, [R, S], is 0 behind a row's length.

    δ_t = r_t + γ·V_{t+1} - V_t and A_t = δ_t + γ·λ·A_{t+1}, from the last token backwards. What an environment says
    between two sampled tokens is part of the next state: it takes no step of its own. A_t + V_t is the value's target.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
    (arXiv:1506.02438), eq. 16.
    """
    advantages = torch.zeros_like(values)
    next_advantages, next_values = torch.zeros_like(final_values), final_values
    for step in reversed(range(values.shape[1])):
        surprise = rewards[:, step] + gamma * next_values - values[:, step]
        inside = lengths > step
        next_advantages = torch.where(inside, surprise + gamma * gae_lambda * next_advantages, 0.0)
        next_values = torch.where(inside, values[:, step], final_values)
        advantages[:, step] = next_advantages
    return advantages


def standardized(advantages: Tensor, *, mean: float, deviation: float) -> Tensor:
    """(A - mean) / (deviation + floor), elementwise; both belong to all trained tokens of a step.

    Source: Andrychowicz et al., "What Matters in On-Policy Reinforcement Learning?" (arXiv:2006.05990).
    """
    return (advantages - mean) / (deviation + DEVIATION_FLOOR)
