"""Losses of single tokens, of policy and critic, and what is measured beside them. Pure functions on tensors."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from storage.algorithm_config import KlEstimator, LossNormalization

LINEAR_ABOVE = 20.0
"""Ratios grow like their exponential up to e^20 and linearly from there, so that none overflows."""


class TokenScores(NamedTuple):
    """What the policy says about sampled tokens; all of shape [tokens], in nats."""

    logprobs: Tensor
    entropies: Tensor


def score_tokens(
    logits: Tensor, token_ids: Tensor, *, temperature: float, entropy_gradient: bool = False
) -> TokenScores:
    """Log-probabilities of tokens under the distribution they were sampled from, and its entropy.

    `logits` [tokens, vocabulary] of any floating type, `token_ids` int64 [tokens]. The distribution is
    softmax(logits / temperature) in float32 (or float64 for float64 logits) over the whole vocabulary: the same
    definition as the generator's. Nucleus sampling (top_p < 1) only truncates it; the kept probabilities are *not*
    renormalised, neither here nor in the generator, so that both sides stay comparable and differentiable.
    Entropies carry a gradient only if asked to.
    """
    raw = logits if logits.dtype == torch.float64 else logits.float()
    log_distribution = torch.log_softmax(raw / temperature, dim=-1)
    logprobs = log_distribution.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    if entropy_gradient:
        possible = log_distribution.clamp(min=torch.finfo(log_distribution.dtype).min)  # 0 · -inf has no gradient
        entropies = -(log_distribution.exp() * possible).sum(dim=-1)
    else:
        entropies = torch.special.entr(log_distribution.detach().exp()).sum(dim=-1)
    return TokenScores(logprobs, entropies)


def exponential_up_to(exponents: Tensor, limit: float) -> Tensor:
    """e^x up to x = limit, then e^limit · (1 + x - limit), which continues value and slope; elementwise."""
    return exponents.clamp(max=limit).exp() + math.exp(limit) * (exponents - limit).clamp(min=0.0)


def clipped_policy_losses(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_weight_cap: float | None,
) -> Tensor:
    """Loss of each sampled token: -min(w·A, clip(r, 1 - clip_low, 1 + clip_high)·A).

    All inputs have shape [tokens], one floating type; log-probabilities in nats; r = exp(logprobs - reference).
    Measured against the log-probabilities *recorded during the rollout*, r holds both how far the policy has moved
    and how far trainer and generator disagree, so that no second correction is needed. Measured against the trainer's
    own at the start of the step it holds the former alone, and `importance_weights` corrects for the latter.

    w is r with a truncated gradient: w = r up to the cap c, then c·(1 + log(r / c)), which continues it smoothly.
    The gradient of a token is therefore min(r, c)·A·∇log p where it isn't clipped: a token with a negative advantage
    that has become far more likely can't dominate the step. c must be at least 1 + clip_high (`AlgorithmConfig` sees
    to that); None: no truncation (below e^20).

    Sources: clipping, PPO (arXiv:1707.06347), eq. 7; separate bounds, DAPO (arXiv:2503.14476), section 3.1;
    truncated importance weights, Ionides, "Truncated Importance Sampling" (2008), and IMPALA (arXiv:1802.01561),
    section 4.1.
    """
    log_ratio = logprobs - reference_logprobs
    weight = exponential_up_to(
        log_ratio, LINEAR_ABOVE if importance_weight_cap is None else math.log(importance_weight_cap)
    )
    bounded = log_ratio.clamp(min=math.log1p(-clip_low), max=math.log1p(clip_high)).exp()
    return -torch.minimum(weight * advantages, bounded * advantages)


def clipped_tokens(log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Which tokens give no gradient because of the clipping: bool [tokens]."""
    above = (log_ratio > math.log1p(clip_high)) & (advantages > 0)
    below = (log_ratio < math.log1p(-clip_low)) & (advantages < 0)
    return above | below


def importance_weights(
    log_ratio: Tensor, rows: Tensor, *, num_rows: int, per_sequence: bool, cap: float
) -> tuple[Tensor, Tensor]:
    """(min(ratio, cap), whether it was truncated), each [tokens]: factors of token losses, without gradient.

    `log_ratio` [tokens] is log p(trainer, before the step) - log p(generator); `rows` int64 [tokens] the row of each
    token. The ratio is that of the token, or with `per_sequence` that of its whole sequence, exp(Σ log_ratio), which
    corrects the sequence's distribution exactly but varies more.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025): truncated
    importance sampling between rollout engine and trainer; cap: Ionides, "Truncated Importance Sampling" (2008).
    """
    exponents = log_ratio.detach()
    if per_sequence:
        exponents = exponents.new_zeros(num_rows).index_add(0, rows, exponents)[rows]
    limit = math.log(cap)
    return exponents.clamp(max=limit).exp(), exponents > limit


def kl_estimates(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates per token of KL(generator || policy), in nats: (k1, k3), each [tokens].

    log_ratio = log p(policy) - log p(generator) at tokens drawn from the generator. k1 = -log_ratio is unbiased,
    k3 = exp(log_ratio) - 1 - log_ratio is unbiased, never negative and of lower variance.

    Source: Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
    """
    return -log_ratio, torch.expm1(log_ratio) - log_ratio


def kl_penalties(logprobs: Tensor, reference_logprobs: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Penalty of each token for leaving the frozen reference policy: an estimate of KL(policy || reference), in nats.

    Both inputs have shape [tokens]; tokens are drawn from the policy. With d = logprobs - reference_logprobs:
    k1 = d, unbiased; k2 = d²/2, biased, of low variance; k3 = exp(-d) - 1 + d, unbiased and never negative.
    Gradients: the mean of d·∇log p is the gradient of KL(policy || reference); that is k2's gradient and, since the
    plain gradient of d has mean zero, by a straight-through term also the one given to k1. k3's gradient,
    (1 - exp(-d))·∇log p, has the gradient of KL(reference || policy) as its mean. exp(-d) is continued linearly
    above e^20.

    Sources: Schulman, "Approximating KL Divergence" (2020); k3 as a loss, DeepSeekMath (arXiv:2402.03300), eq. 4; the
    gradients, Tang and Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (arXiv:2506.09477).
    """
    distance = logprobs - reference_logprobs
    if estimator == "k3":
        return exponential_up_to(-distance, LINEAR_ABOVE) - 1 + distance
    half_square = 0.5 * distance.square()
    return half_square if estimator == "k2" else distance.detach() + half_square - half_square.detach()


def token_weights(lengths: Tensor, rows: Tensor, *, normalization: LossNormalization, constant_length: int) -> Tensor:
    """Factor of each token's loss [tokens], so that their sum divided by `loss_denominator` is the normalized loss.

    `lengths` int64 [rows]: trained tokens of each row; `rows` int64 [tokens]: the row of each token.
    token_mean: 1; sequence_mean: 1 / length of the row; constant_length: 1 / `constant_length`.

    Sources: per sequence, GRPO (DeepSeekMath, arXiv:2402.03300), eq. 3; per token, DAPO (arXiv:2503.14476), section
    3.3; by a constant, Dr. GRPO (arXiv:2503.20783).
    """
    if normalization == "sequence_mean":
        return lengths.float().reciprocal()[rows]
    return torch.full(rows.shape, 1.0 if normalization == "token_mean" else 1.0 / constant_length, device=rows.device)


def loss_denominator(*, num_tokens: int, num_rows: int, normalization: LossNormalization) -> int:
    """What the sum of weighted token losses of one update is divided by: its trained tokens, or its rows."""
    return num_tokens if normalization == "token_mean" else num_rows


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """Loss of each value: max((V - R)², (V_clipped - R)²) / 2, with V_clipped = V_old + clamp(V - V_old, ±clip).

    All inputs have shape [tokens]: the critic's value now and before the step, and its target. Without `clip` the
    first term alone. A value that has already moved by `clip` towards its target gives no gradient.

    Source: the reference implementation of PPO (OpenAI baselines, ppo2); Engstrom et al., "Implementation Matters in
    Deep Policy Gradients" (arXiv:2005.12729).
    """
    errors = (values - returns).square()
    if clip is not None:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (bounded - returns).square())
    return 0.5 * errors


def clipped_values(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """Which values give no gradient because of the clipping: bool [tokens]."""
    if clip is None:
        return torch.zeros_like(values, dtype=torch.bool)
    moved = values - old_values
    bounded = old_values + moved.clamp(-clip, clip)
    return (moved.abs() > clip) & ((bounded - returns).square() > (values - returns).square())
