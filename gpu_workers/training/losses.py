"""The policy-gradient loss of single tokens, and what is measured beside it. Pure functions on tensors."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class TokenScores(NamedTuple):
    """What the policy says about sampled tokens; all of shape [tokens], in nats."""

    logprobs: Tensor
    entropies: Tensor


def score_tokens(logits: Tensor, token_ids: Tensor, *, temperature: float) -> TokenScores:
    """Log-probabilities of tokens under the distribution they were sampled from, and its entropy.

    `logits` [tokens, vocabulary] of any floating type, `token_ids` int64 [tokens]. The distribution is
    softmax(logits / temperature) in float32 (or float64 for float64 logits) over the whole vocabulary: the same
    definition as the generator's. Nucleus sampling (top_p < 1) only truncates it; the kept probabilities are *not*
    renormalised, neither here nor in the generator, so that both sides stay comparable and differentiable.
    Entropies carry no gradient.
    """
    raw = logits if logits.dtype == torch.float64 else logits.float()
    log_distribution = torch.log_softmax(raw / temperature, dim=-1)
    logprobs = log_distribution.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    entropies = torch.special.entr(log_distribution.detach().exp()).sum(dim=-1)
    return TokenScores(logprobs, entropies)


def clipped_policy_losses(
    logprobs: Tensor,
    recorded_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_weight_cap: float,
) -> Tensor:
    """Loss of each sampled token: -min(w·A, clip(r, 1 - clip_low, 1 + clip_high)·A).

    All inputs have shape [tokens], one floating type; log-probabilities in nats. r = exp(logprobs - recorded) is
    measured against the log-probabilities *recorded during the rollout*: it holds both how far the policy has moved
    and how far trainer and generator disagree, so that no second correction is needed.

    w is r with a truncated gradient: w = r up to the cap c, then c·(1 + log(r / c)), which continues it smoothly.
    The gradient of a token is therefore min(r, c)·A·∇log p where it isn't clipped: a token with a negative advantage
    that has become far more likely can't dominate the step. c must be at least 1 + clip_high (`RunConfig` sees
    to that).

    Sources: clipping, PPO (arXiv:1707.06347), eq. 7; separate bounds, DAPO (arXiv:2503.14476), section 3.1;
    truncated importance weights, Ionides, "Truncated Importance Sampling" (2008), and IMPALA (arXiv:1802.01561),
    section 4.1.
    """
    log_ratio = logprobs - recorded_logprobs
    log_cap = math.log(importance_weight_cap)
    weight = log_ratio.clamp(max=log_cap).exp() + importance_weight_cap * (log_ratio - log_cap).clamp(min=0.0)
    bounded = log_ratio.clamp(min=math.log1p(-clip_low), max=math.log1p(clip_high)).exp()
    return -torch.minimum(weight * advantages, bounded * advantages)


def clipped_tokens(log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Which tokens give no gradient because of the clipping: bool [tokens]."""
    above = (log_ratio > math.log1p(clip_high)) & (advantages > 0)
    below = (log_ratio < math.log1p(-clip_low)) & (advantages < 0)
    return above | below


def kl_estimates(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates per token of KL(generator || policy), in nats: (k1, k3), each [tokens].

    log_ratio = log p(policy) - log p(generator) at tokens drawn from the generator. k1 = -log_ratio is unbiased,
    k3 = exp(log_ratio) - 1 - log_ratio is unbiased, never negative and of lower variance.

    Source: Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
    """
    return -log_ratio, torch.expm1(log_ratio) - log_ratio
