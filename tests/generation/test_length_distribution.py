"""Responses that are interrupted have the same lengths as those that are not, if their tokens are kept."""

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt

import pytest

from benchmarks.length_distribution import LengthDistribution
from benchmarks.simulated_rollouts import Disturbances, InterruptedRollouts, Outcome, Workload
from gpu_workers.controller.ports import SiblingOrder
from gpu_workers.generation.capture import Completion
from storage.records import RecoveryLevel

LENGTHS = LengthDistribution()
LONG = LENGTHS.longest(0.05)
MEAN_BOUND, LONG_BOUND = 0.01, 0.03
# One kill per ten mean response times, and new weights some three times within a response.
DISTURBANCES = Disturbances(kill_every=10 * LENGTHS.mean, refit_every=12)


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Nothing here is a cycle, and looking for cycles among thousands of running calls takes as long as the calls."""
    gc.disable()
    yield
    gc.enable()


@dataclass
class Continued:
    """Continued completions, and those that are not their part and what follows it."""

    count: int = 0
    across_versions: int = 0
    broken: list[tuple[SiblingOrder, Completion]] = field(default_factory=list)

    def see(self, sibling: SiblingOrder, completion: Completion) -> None:
        if sibling.partial is None or not len(sibling.partial.sampled):
            return
        part, versions = sibling.partial.sampled, completion.versions
        self.count += 1
        self.across_versions += versions[-1] > part.versions[-1]
        kept = (
            completion.token_ids[: len(part)] == tuple(part.token_ids.tolist())
            and completion.logprobs[: len(part)] == tuple(part.logprobs.tolist())
            and versions[: len(part.versions)] == part.versions
            and completion.version_starts[: len(part.versions)] == part.version_starts
        )
        follows = all(b == (a + 1 if a < 12 else 3) for a, b in pairwise(completion.token_ids[:-1]))
        if not (kept and follows and completion.token_ids[-1] == 1 and list(versions) == sorted(set(versions))):
            self.broken.append((sibling, completion))


def rollouts(level: RecoveryLevel, number: int, continued: Continued) -> Outcome:
    run = InterruptedRollouts(
        level, Workload(number, in_flight=1024), DISTURBANCES, LENGTHS, seed=3, observe=continued.see
    )
    return asyncio.run(run.run())


def relative_error(measured: float, known: float) -> float:
    return measured / known - 1


def test_a_response_continued_after_each_kill_is_as_long_as_one_that_nothing_interrupts():
    number, long_share, seen = 195_000, float(LENGTHS.longer[LONG]), Continued()
    assert 3 * LENGTHS.deviation / LENGTHS.mean / sqrt(number) < MEAN_BOUND
    assert 3 * sqrt((1 - long_share) / long_share / number) < LONG_BOUND

    kept = rollouts(RecoveryLevel.PREFIX, number, seen)

    assert len(kept.lengths) == number
    assert relative_error(kept.mean, LENGTHS.mean) == pytest.approx(0, abs=MEAN_BOUND)
    assert relative_error(kept.longer(LONG), long_share) == pytest.approx(0, abs=LONG_BOUND)
    assert kept.sampled_again == 0
    assert (kept.continued > 0).mean() > 0.05
    assert (kept.continued > 1).sum() > 100
    assert seen.count > 10_000
    assert seen.across_versions > 5_000
    assert seen.broken == []

    redrawn = rollouts(RecoveryLevel.SIBLING, number // 8, Continued())

    assert relative_error(redrawn.mean, LENGTHS.mean) < -4 * MEAN_BOUND
    assert relative_error(redrawn.longer(LONG), long_share) < -4 * LONG_BOUND
