"""How kills change the lengths of responses, at each recovery level: `python -m benchmarks.length_bias`.

A simulated engine (`benchmarks.simulated_engine`), of which the lengths of responses are known exactly, is killed at
random moments, once in ten mean response times, while weights are exchanged: what is sampled again is another response.
The generation side is the real one (model calls, the look at the running ones, their continuation); what a controller
does about a kill is in `benchmarks.simulated_rollouts`. Groups of 8 siblings of one call, and of three calls one
after the other; a rollout's length is that of all its calls. "Generator lost": the run goes on without a restart, and
the running calls of a lost machine from the last look at them. `--picture FILE` writes a picture (SVG).
"""

import argparse
import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.length_bias_picture import Curve, draw
from benchmarks.length_distribution import LengthDistribution
from benchmarks.measuring import show
from benchmarks.simulated_rollouts import Disturbances, InterruptedRollouts, Workload
from storage.records import RecoveryLevel

LENGTHS = LengthDistribution()
SIBLINGS = 8
TURNS = 3
CALLS_TOGETHER = 512
MEAN_TIMES_PER_KILL = 10
# A fifth of a mean response: of the order of a 5 s interval where responses take half a minute.
SAVED_EVERY = 6
REFIT_EVERY = 12
LEVELS = {
    1: (RecoveryLevel.PROMPT_GROUP, RecoveryLevel.SIBLING, RecoveryLevel.PREFIX),
    TURNS: (RecoveryLevel.PROMPT_GROUP, RecoveryLevel.SIBLING, RecoveryLevel.TURN, RecoveryLevel.PREFIX),
}


@dataclass(frozen=True)
class Measured:
    """Lengths of the rollouts of one workload at one level; None: nothing was killed."""

    level: RecoveryLevel | None
    turns: int
    lengths: NDArray[np.int64]
    kills: int
    sampled_again: float
    ends_run: bool

    @property
    def name(self) -> str:
        """The level, and what is killed if it is not the run."""
        level = "no kill" if self.level is None else self.level.value
        return level if self.ends_run else f"{level}, generator lost"

    @property
    def mean_error(self) -> tuple[float, float]:
        """The mean against the known one, and its standard error, both relative."""
        known = self.turns * LENGTHS.mean
        return float(self.lengths.mean()) / known - 1, LENGTHS.deviation * sqrt(self.turns / len(self.lengths)) / known

    @property
    def long_error(self) -> tuple[float, float]:
        """The share of the known distribution's longest 5 % against the known share, and its standard error."""
        known = LENGTHS.longer_in_all(self.turns)
        length = int(np.argmax(known <= 0.05))
        share = float(known[length])
        error = sqrt((1 - share) / share / len(self.lengths))
        return float((self.lengths > length).mean()) / share - 1, error

    def against_known(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Share of rollouts of more than each of these lengths against the known share."""
        longer = len(self.lengths) - np.searchsorted(np.sort(self.lengths), lengths, side="right")
        return longer / len(self.lengths) / LENGTHS.longer_in_all(self.turns)[lengths]


def measure(level: RecoveryLevel | None, turns: int, calls: int, *, ends_run: bool = True) -> Measured:
    """One run of the workload."""
    workload = Workload(calls // (SIBLINGS * turns), CALLS_TOGETHER // SIBLINGS, siblings=SIBLINGS, turns=turns)
    kill_every = 0 if level is None else MEAN_TIMES_PER_KILL * LENGTHS.mean
    disturbances = Disturbances(kill_every, REFIT_EVERY, SAVED_EVERY, ends_run)
    run = InterruptedRollouts(level or RecoveryLevel.SIBLING, workload, disturbances, LENGTHS, seed=1)
    outcome = asyncio.run(run.run())
    lengths = outcome.lengths.reshape(-1, turns).sum(axis=1)
    return Measured(level, turns, lengths, outcome.kills, outcome.sampled_again, ends_run)


def predicted(turns: int) -> tuple[str, ...]:
    """What the level `sibling` comes to if no token of a redrawn rollout is what it was before.

    A rollout of t tokens is not met by a kill with the chance (1 - 1/T)^t, with T tokens from kill to kill, and is
    drawn again until it is not: lengths are weighted with that chance.
    """
    known = LENGTHS.longer_in_all(turns)
    lengths, length = np.arange(1, len(known)), int(np.argmax(known <= 0.05))
    weights = (known[:-1] - known[1:]) * (1 - 1 / (MEAN_TIMES_PER_KILL * LENGTHS.mean)) ** lengths
    weights /= weights.sum()
    mean = float(weights @ lengths) / (turns * LENGTHS.mean) - 1
    long = float(weights[length:].sum() / known[length]) - 1
    return "sibling, predicted", f"{100 * mean:+.1f}", f"{100 * long:+.1f}", "", "", ""


def named(turns: int) -> str:
    """The workload in words."""
    return f"Rollouts of {turns} call{'s' * (turns > 1)}"


def row_of(one: Measured) -> tuple[str, ...]:
    """One line of the table."""
    errors = (f"{100 * error:+.1f} ± {100 * deviation:.1f}" for error, deviation in (one.mean_error, one.long_error))
    return one.name, *errors, f"{100 * one.sampled_again:.1f}", f"{len(one.lengths):,}", str(one.kills)


def curves(measured: Sequence[Measured]) -> list[Curve]:
    """For the picture: from the shortest to the longest one in 200, beyond which chance is all that one sees."""
    known = LENGTHS.longer_in_all(measured[0].turns)
    lengths = np.arange(1, int(np.argmax(known <= 0.005)), dtype=np.int64)
    return [Curve(one.name, lengths.tolist(), one.against_known(lengths).tolist()) for one in measured]


def main() -> None:
    """Measure, print, and draw if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=240_000, help="model calls for each level and workload")
    parser.add_argument("--picture", type=Path, help="write the shares of long rollouts to this SVG")
    arguments = parser.parse_args()
    gc.disable()  # nothing here is a cycle, and thousands of running calls would be searched for one again and again
    measured = {
        turns: [measure(level, turns, arguments.calls) for level in (None, *levels)] for turns, levels in LEVELS.items()
    }
    lost = {turns: measure(RecoveryLevel.PREFIX, turns, arguments.calls, ends_run=False) for turns in LEVELS}
    for turns, results in measured.items():
        mean, longest = turns * LENGTHS.mean, int(np.argmax(LENGTHS.longer_in_all(turns) <= 0.05))
        show(
            f"{named(turns)}, a kill in {MEAN_TIMES_PER_KILL} mean response times: against the known mean "
            f"({mean:.1f} tokens) and longest 5 % (over {longest} tokens)",
            ("level", "mean, %", "longest 5 %, %", "sampled again, %", "rollouts", "kills"),
            [*map(row_of, [*results, lost[turns]]), predicted(turns)],
            note="± one standard error",
        )
    if arguments.picture is not None:
        draw(
            {f"{turns} call{'s' * (turns > 1)}": curves(results) for turns, results in measured.items()},
            arguments.picture,
        )


if __name__ == "__main__":
    main()
