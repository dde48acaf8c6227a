"""A distribution of response lengths with a long tail, of which every figure is known exactly."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths L = minimum + X, in tokens; X is drawn from one of several geometric distributions on 1, 2, ...

    `parts` are their (weight w, mean m). So P(L > t) = Σ w (1 - 1/m)^(t - minimum) for t >= minimum and 1 before, the
    mean is minimum + Σ w m, and the second moment of X is Σ w (2 m² - m). With the parts given here the mean is
    8 + 0.8 x 18 + 0.2 x 50 = 32.4 tokens, the standard deviation sqrt(0.8 x 630 + 0.2 x 4950 - 24.4²) = 29.98 tokens,
    and the longest 5 % are those of more than 87 tokens: P(L > 87) = 0.8 (17/18)^79 + 0.2 (49/50)^79 = 0.0493. `limit`
    is where the tables end; P(L > 4096) is 3e-37.
    """

    minimum: int = 8
    parts: tuple[tuple[float, float], ...] = ((0.8, 18.0), (0.2, 50.0))
    limit: int = 4096

    @cached_property
    def longer(self) -> NDArray[np.float64]:
        """P(L > t) for t = 0 ... limit."""
        beyond = np.maximum(np.arange(self.limit + 1) - self.minimum, 0)
        weights, means = np.array(self.parts).T
        return np.asarray(weights @ (1 - 1 / means[:, np.newaxis]) ** beyond, np.float64)

    @cached_property
    def hazard(self) -> NDArray[np.float64]:
        """By position from 0: the chance that this token ends a response that did not end before it."""
        return 1 - self.longer[1:] / self.longer[:-1]

    @property
    def mean(self) -> float:
        """Mean length."""
        return self.minimum + sum(weight * mean for weight, mean in self.parts)

    @property
    def deviation(self) -> float:
        """Standard deviation of the lengths."""
        square = sum(weight * (2 * mean**2 - mean) for weight, mean in self.parts)
        return float(np.sqrt(square - (self.mean - self.minimum) ** 2))

    def longest(self, share: float) -> int:
        """The least length that at most this share of all responses exceeds."""
        return int(np.argmax(self.longer <= share))

    def longer_in_all(self, calls: int) -> NDArray[np.float64]:
        """P(L1 + L2 + ... > t) of so many independent calls together, for t = 0 ... limit."""
        one = np.concatenate([[0.0], self.longer[:-1] - self.longer[1:]])
        total = one
        for _ in range(calls - 1):
            total = np.convolve(total, one)[: self.limit + 1]
        return 1 - np.cumsum(total)
