"""What an optimizer step measures: sums over its trained tokens, added over ranks before they become metrics."""

import math

import torch
from torch import Tensor

from gpu_workers.training.losses import clipped_tokens, kl_estimates
from gpu_workers.training.ranks import Ranks
from storage.run_config import AlgorithmConfig

LARGEST_LOG_RATIO = 50.0
"""Importance ratios are reported up to e^50, so that no metric overflows; the loss has its own cap."""

_SUMS = (
    "loss",
    "ratio",
    "entropy",
    "clipped",
    "truncated",
    "k1",
    "k3",
    "mismatch",
    "fresh_mismatch",
    "fresh",
    "tokens",
)
_MAXIMA = ("ratio", "mismatch", "fresh_mismatch")


class StepStatistics:
    """Sums and maxima over trained tokens, in float64 on the device.

    "Mismatch" is |log p(trainer) - log p(generator)| in nats. Over all tokens it also holds how far the policy has
    moved since a token was sampled; over *fresh* tokens, those generated under the version that is being trained, it
    is the disagreement of the two implementations alone.
    """

    def __init__(self, config: AlgorithmConfig, *, device: torch.device) -> None:
        self._config = config
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    def add(
        self,
        *,
        losses: Tensor,
        log_ratio: Tensor,
        advantages: Tensor,
        entropies: Tensor,
        fresh: Tensor,
    ) -> None:
        """Count tokens; all tensors have shape [tokens] and no gradient; `fresh` is bool."""
        bounded = log_ratio.double().clamp(max=LARGEST_LOG_RATIO)
        ratio, mismatch = bounded.exp(), bounded.abs()
        k1, k3 = kl_estimates(bounded)
        clipped = clipped_tokens(
            log_ratio, advantages, clip_low=self._config.clip_low, clip_high=self._config.clip_high
        )
        truncated = (advantages < 0) & (log_ratio > math.log(self._config.importance_weight_cap))
        fresh_mismatch = mismatch * fresh
        columns = (losses, ratio, entropies, clipped, truncated, k1, k3, mismatch, fresh_mismatch, fresh, fresh | True)
        self._sums += torch.stack([column.double().sum() for column in columns])
        maxima = torch.stack([column.max() for column in (ratio, mismatch, fresh_mismatch)])
        self._maxima = torch.maximum(self._maxima, maxima)

    @property
    def loss_is_finite(self) -> bool:
        """Whether no token's loss was NaN or infinite."""
        return math.isfinite(self._sums[_SUMS.index("loss")].item())

    @property
    def num_tokens(self) -> int:
        """Trained tokens counted."""
        return int(self._sums[_SUMS.index("tokens")].item())

    def add_ranks(self, ranks: Ranks) -> None:
        """Make these the statistics of all ranks together; once per step."""
        ranks.add([self._sums])
        ranks.maximum(self._maxima)

    def metrics(self) -> dict[str, float]:
        """Means over the trained tokens (0 without any), maxima and the count."""
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, self._maxima.tolist(), strict=True))
        tokens, fresh = max(sums["tokens"], 1.0), max(sums["fresh"], 1.0)
        return {
            "loss": sums["loss"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "clip_fraction": sums["clipped"] / tokens,
            "truncated_fraction": sums["truncated"] / tokens,
            "importance_ratio_mean": sums["ratio"] / tokens,
            "importance_ratio_max": maxima["ratio"],
            "kl_k1": sums["k1"] / tokens,
            "kl_k3": sums["k3"] / tokens,
            "logprob_mismatch_mean": sums["mismatch"] / tokens,
            "logprob_mismatch_max": maxima["mismatch"],
            "fresh_logprob_mismatch_mean": sums["fresh_mismatch"] / fresh,
            "fresh_logprob_mismatch_max": maxima["fresh_mismatch"],
            "fresh_tokens": sums["fresh"],
            "tokens": sums["tokens"],
        }
