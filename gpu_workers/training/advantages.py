"""Advantages: how much better a completion is than the other completions of its prompt."""

from torch import Tensor

DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation, in reward units, so that rounding noise is not blown up to unit size."""


def group_advantages(rewards: Tensor, *, divide_by_standard_deviation: bool) -> Tensor:
    """Rewards minus their group's mean, by choice divided by their group's sample standard deviation.

    `rewards` has shape [groups, generations] (floating point; float64 keeps all digits); the result has the same
    shape and type. All completions of a group belong to its baseline, also those masked from the loss. A group whose
    rewards are all equal gets exact zeros, whatever the rounding of its mean.

    Source: group-relative advantages, DeepSeekMath (arXiv:2402.03300), section 4.1.2,
    A_i = (r_i - mean(r)) / std(r); without the division, Dr. GRPO (arXiv:2503.20783).
    """
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    if divide_by_standard_deviation:
        centred = centred / (rewards.std(dim=-1, keepdim=True, correction=1) + DEVIATION_FLOOR)
    return centred.masked_fill(equal_rewards(rewards).unsqueeze(-1), 0.0)


def equal_rewards(rewards: Tensor) -> Tensor:
    """Which groups carry no signal: [groups, generations] -> bool [groups]."""
    return rewards.amax(dim=-1) == rewards.amin(dim=-1)
