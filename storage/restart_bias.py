"""Whether work that a restart interrupted differs from the rest: its length and its reward, with confidence intervals.

A restart that lost long rollouts more often than short ones would shift what is trained. The unit is the prompt group,
since rollouts of one prompt resemble each other: each group counts with the mean of its rollouts.

Two things differ without any fault of the restart. A run learns, so that only groups that started from similar weights
are compared. And what runs at a moment is longer than the average, since what is long runs at more moments: the same
comparison in a run that was not stopped, or at another level, says how much of a difference in length is due to that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from storage.history import Event, History, Life
from storage.records import RecoveryLevel

CONFIDENCE = 0.95
MEASURES = ("tokens", "reward")
NEAR_VERSIONS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """Groups of one kind: their mean with its confidence interval (None for less than two groups), and quantiles.

    The interval is mean ± t(n - 1) s / sqrt(n), with s² the sample variance of the n groups.
    """

    groups: int
    mean: float
    low: float | None
    high: float | None
    median: float
    ninetieth: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Groups of one recovery level that were unfinished at a restart, against those that were not.

    `measure`: `tokens` sampled per rollout, or `reward`. `difference` is that of the means, interrupted minus others,
    with Welch's interval: ± t(ν) sqrt(s1²/n1 + s2²/n2), ν = (s1²/n1 + s2²/n2)² / ((s1²/n1)²/(n1 - 1) +
    (s2²/n2)²/(n2 - 1)). It is None where one side has no group, its interval where one has less than two.
    """

    level: str
    measure: str
    interrupted: Sample | None
    others: Sample | None
    difference: float | None
    low: float | None
    high: float | None

    @property
    def is_biased(self) -> bool:
        """Whether the interval excludes that there is no difference; by chance alone one in twenty does."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


def restart_bias(history: History, *, near_versions: int = NEAR_VERSIONS) -> list[Comparison]:
    """A comparison for each recovery level and measure, over the finished groups of the effective history.

    Of the others only those count that were started from weights at most `near_versions` train steps away from those
    of an interrupted one; without an interrupted one, all of them.

    A group counts as interrupted when the process that published it had launched it again after its restore. Finished
    groups that a restart only kept count as the others do. A group's level is the one that it was reserved with; older
    traces do not tell it, and it is taken to be that of the process that reserved it.
    """
    found = list(_finished(history))
    comparisons = []
    for level in sorted({group.level for group in found}, key=_depth):
        near = _near([group for group in found if group.level == level], near_versions)
        comparisons += [_compare(level, measure, near) for measure in MEASURES]
    return comparisons


def _depth(level: str) -> tuple[int, str]:
    """From the level that keeps least to the one that keeps most; names that nobody knows come last."""
    levels = [str(known) for known in RecoveryLevel]
    return levels.index(level) if level in levels else len(levels), level


def _near(groups: Sequence["_Group"], near_versions: int) -> list["_Group"]:
    versions = {group.start_version for group in groups if group.interrupted}
    if not versions:
        return list(groups)
    near = {version + away for version in versions for away in range(-near_versions, near_versions + 1)}
    return [group for group in groups if group.interrupted or group.start_version in near]


def bias_rows(comparisons: Sequence[Comparison]) -> Iterator[dict[str, Any]]:
    """One line for each comparison, flat: for a table or a frame."""
    for one in comparisons:
        row: dict[str, Any] = {"level": one.level, "measure": one.measure}
        for name, sample in (("interrupted", one.interrupted), ("others", one.others)):
            facts = ("groups", "mean", "low", "high", "median", "ninetieth")
            row |= {f"{name}_{fact}": None if sample is None else getattr(sample, fact) for fact in facts}
        yield {**row, "difference": one.difference, "low": one.low, "high": one.high, "biased": one.is_biased}


@dataclass(frozen=True, slots=True)
class _Group:
    level: str
    interrupted: bool
    start_version: int
    tokens: float
    reward: float


def _finished(history: History) -> Iterator[_Group]:
    """The newest publication of each group that still counts."""
    levels = _levels(history)
    reserved: dict[str, str] = {}
    newest: dict[str, _Group] = {}
    for life, until in reversed(_effective(history)):
        again = {event["group_id"] for event in life.events if event["event"] == "redispatched"}
        for event in life.events:
            if event["event"] == "group_reserved":
                reserved[event["group_id"]] = event.get("level", levels[life.run_process])
            if event["event"] == "group_published" and event["rewards"] and float(event["t"]) <= until:
                level = reserved.get(event["group_id"], levels[life.run_process])
                newest[event["group_id"]] = _group(event, level, interrupted=event["group_id"] in again)
    yield from newest.values()


def _group(event: Event, level: str, *, interrupted: bool) -> _Group:
    rollouts = len(event["rewards"])
    return _Group(
        level=level,
        interrupted=interrupted,
        start_version=int(event["start_version"]),
        tokens=int(event["num_tokens"]) / rollouts,
        reward=sum(event["rewards"]) / rollouts,
    )


def _effective(history: History) -> list[tuple[Life, float]]:
    """The newest process whole, and those below it up to the cut that was restored; newest first."""
    if not history.lives:
        return []
    newest = history.lives[-1]
    return [(newest, math.inf), *((segment.life, segment.cut_time) for segment in history.below(newest))]


def _levels(history: History) -> dict[str, str]:
    """The recovery level that each process was configured with, as its manifests tell; that of the bundle it restored
    for one that published nothing.
    """
    told = {manifest.writer: manifest for manifest in history.manifests if manifest.config}
    levels = {}
    for life in history.lives:
        sequence = None if life.restored is None else life.restored["sequence"]
        restored = None if sequence is None else history.manifest(int(sequence))
        manifest = told.get(life.run_process, restored)
        recovery = {} if manifest is None else manifest.config.get("rollout_recovery", {})
        levels[life.run_process] = str(recovery.get("target_level", "unknown"))
    return levels


def _compare(level: str, measure: str, groups: Sequence[_Group]) -> Comparison:
    values = {
        interrupted: np.array([getattr(group, measure) for group in groups if group.interrupted is interrupted])
        for interrupted in (True, False)
    }
    first, second = values[True], values[False]
    difference = float(first.mean() - second.mean()) if len(first) and len(second) else None
    half = _welch(first, second)
    return Comparison(
        level=level,
        measure=measure,
        interrupted=_sample(first),
        others=_sample(second),
        difference=difference,
        low=None if difference is None or half is None else difference - half,
        high=None if difference is None or half is None else difference + half,
    )


def _sample(values: np.ndarray) -> Sample | None:
    if not len(values):
        return None
    mean, half = float(values.mean()), None
    if len(values) > 1:
        half = t_quantile(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    median, ninetieth = (float(np.quantile(values, share)) for share in (0.5, 0.9))
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return Sample(len(values), mean, low, high, median, ninetieth)


def _welch(first: np.ndarray, second: np.ndarray) -> float | None:
    """Half the width of Welch's interval for the difference of two means."""
    if len(first) < 2 or len(second) < 2:
        return None
    a, b = (float(values.var(ddof=1)) / len(values) for values in (first, second))
    if a + b == 0.0:
        return 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return t_quantile(freedom) * math.sqrt(a + b)


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t: exact for 1 and 2 degrees of freedom, else the expansion of Abramowitz and
    Stegun, 26.7.5, which is within 0.5 % of it from 3 on.
    """
    p = 0.5 + confidence / 2
    if freedom < 2:  # Welch's degrees of freedom are at least 1; the wider interval for what lies between
        return math.tan(math.pi * (p - 0.5))
    if freedom < 3:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
