"""Sampling noise as a function of who samples and where, never of time, batch or attempt.

A sibling has one seed; the noise of its token at `position` comes from the row seed (seed, position). Generating a
sibling again, or continuing it from a partial completion, therefore repeats its tokens as long as the weights do.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

_STREAM = "midflight sampling v1"

# SplitMix64 (Steele, Lea, Flood 2014): increment and the two multipliers of the finalizer.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def sampling_seed(run_seed: int, *, prompt_id: int, epoch: int, generation_index: int, turn: int) -> int:
    """The seed of one model call, in [0, 2**63). The attempt is left out on purpose."""
    name = f"{_STREAM}|{run_seed}|{prompt_id}|{epoch}|{generation_index}|{turn}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


def row_seeds(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Seeds of the rows of one decoding step: `hash(seed, position)`, elementwise, in [0, 2**63)."""
    return seeds_at(mixed_seeds(seeds), positions)


def mixed_seeds(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The part of `row_seeds` that is the same at every position."""
    return _mix(seeds + _INCREMENT)


def seeds_at(mixed: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The rest of `row_seeds`, for a row's `mixed_seeds`. Arrays only, whose products wrap around without a warning."""
    mixed = _mix(mixed + (positions + np.uint64(1)) * _INCREMENT)
    return (mixed >> np.uint64(1)).view(np.int64)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))
