"""What a step measures: sums over its trained tokens, added over ranks before they become metrics.

With several epochs a token counts once in each, as the policy or critic was then.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_workers.training.losses import kl_estimates
from gpu_workers.training.ranks import Ranks

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
    "penalty",
    "mismatch",
    "fresh_mismatch",
    "fresh",
    "tokens",
)
_MAXIMA = ("ratio", "mismatch", "fresh_mismatch")


class StepStatistics:
    """The policy's sums and maxima over trained tokens, in float64 on the device.

    "Mismatch" is |log p(trainer) - log p(generator)| in nats. Over all tokens it also holds how far the policy has
    moved since a token was sampled; over *fresh* tokens, those generated under the very weights that are measured, it
    is the disagreement of the two implementations alone.
    """

    def __init__(self, *, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    def add(
        self,
        *,
        losses: Tensor,
        log_ratio: Tensor,
        clipped: Tensor,
        truncated: Tensor,
        entropies: Tensor,
        penalties: Tensor,
        fresh: Tensor,
    ) -> None:
        """Count tokens; all tensors have shape [tokens] and no gradient; `log_ratio` is that of policy to generator,
        `penalties` the KL towards the reference; `clipped`, `truncated` and `fresh` are bool."""
        bounded = log_ratio.double().clamp(max=LARGEST_LOG_RATIO)
        ratio, mismatch = bounded.exp(), bounded.abs()
        k1, k3 = kl_estimates(bounded)
        fresh_mismatch = mismatch * fresh
        columns = [losses, ratio, entropies, clipped, truncated, k1, k3, penalties]
        columns += [mismatch, fresh_mismatch, fresh, fresh | True]
        self._sums += torch.stack([column.double().sum() for column in columns])
        maxima = torch.stack([column.max() for column in (ratio, mismatch, fresh_mismatch)])
        self._maxima = torch.maximum(self._maxima, maxima)

    @property
    def loss_is_finite(self) -> bool:
        """Whether no token's loss was NaN or infinite."""
        return math.isfinite(self._sums[_SUMS.index("loss")].item())

    @property
    def num_tokens(self) -> int:
        """Tokens counted."""
        return int(self._sums[_SUMS.index("tokens")].item())

    def add_ranks(self, ranks: Ranks) -> None:
        """Make these the statistics of all ranks together; once per step."""
        ranks.add([self._sums])
        ranks.maximum(self._maxima)

    def metrics(self, *, denominator: int, with_reference: bool) -> dict[str, float]:
        """Means over the counted tokens (0 without any) and maxima; the loss is its sum by `denominator`."""
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, self._maxima.tolist(), strict=True))
        tokens, fresh = max(sums["tokens"], 1.0), max(sums["fresh"], 1.0)
        return {
            "loss": sums["loss"] / max(denominator, 1),
            "entropy": sums["entropy"] / tokens,
            "clip_fraction": sums["clipped"] / tokens,
            "truncated_fraction": sums["truncated"] / tokens,
            "importance_ratio_mean": sums["ratio"] / tokens,
            "importance_ratio_max": maxima["ratio"],
            "kl_k1": sums["k1"] / tokens,
            "kl_k3": sums["k3"] / tokens,
            **({"reference_kl": sums["penalty"] / tokens} if with_reference else {}),
            "logprob_mismatch_mean": sums["mismatch"] / tokens,
            "logprob_mismatch_max": maxima["mismatch"],
            "fresh_logprob_mismatch_mean": sums["fresh_mismatch"] / fresh,
            "fresh_logprob_mismatch_max": maxima["fresh_mismatch"],
            "fresh_tokens": sums["fresh"],
        }


class Moments:
    """Count, mean and standard deviation of a column of numbers that several ranks hold parts of."""

    def __init__(self, values: Tensor, ranks: Ranks, *, device: torch.device) -> None:
        """`values` [n], float64, this rank's part. All ranks construct it at once."""
        sums = torch.stack([torch.tensor(float(len(values)), dtype=torch.float64), values.sum()]).to(device)
        ranks.add([sums])
        self.count, total = sums.tolist()
        self.mean = total / max(self.count, 1.0)
        squares = (values - self.mean).square().sum().to(device)
        ranks.add([squares])
        self.deviation = math.sqrt(squares.item() / max(self.count - 1.0, 1.0))


class CriticStatistics:
    """The critic's losses over trained tokens, in float64 on the device."""

    def __init__(self, *, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, losses: Tensor, clipped: Tensor) -> None:
        """Count tokens; both have shape [tokens] and no gradient, `clipped` is bool."""
        columns: Sequence[Tensor] = (losses, clipped, clipped | True)
        self._sums += torch.stack([column.double().sum() for column in columns])

    @property
    def loss_is_finite(self) -> bool:
        """Whether no value's loss was NaN or infinite."""
        return math.isfinite(self._sums[0].item())

    def add_ranks(self, ranks: Ranks) -> None:
        """Make these the statistics of all ranks together; once per step."""
        ranks.add([self._sums])

    def metrics(self) -> dict[str, float]:
        """Means over the counted tokens (0 without any)."""
        loss, clipped, tokens = self._sums.tolist()
        return {"value_loss": loss / max(tokens, 1.0), "value_clip_fraction": clipped / max(tokens, 1.0)}
