"""Whether restarts change what is trained, as a table of a report."""

from collections.abc import Sequence
from typing import Any

from storage.restart_bias import Comparison, Sample
from tasks.report_tables import ReportTable

BIAS = (
    "Groups that were unfinished at a restart against others started from similar weights, per recovery level: means "
    "with 95 % intervals. What runs at a given moment is longer than the average by itself: compare levels, or runs."
)
UNITS = {"tokens": "tokens per rollout", "reward": "reward"}


def bias_tables(comparisons: Sequence[Comparison]) -> list[ReportTable]:
    """One table, where anything lived through a restart."""
    rows = [_row(one) for one in comparisons if one.interrupted is not None]
    return [ReportTable("restart-bias", "Work that lived through a restart", rows, BIAS)] if rows else []


def _row(one: Comparison) -> dict[str, Any]:
    return {
        "level": one.level,
        "measure": UNITS[one.measure],
        "restarted groups": 0 if one.interrupted is None else one.interrupted.groups,
        "their mean": _mean(one.interrupted),
        "other groups": 0 if one.others is None else one.others.groups,
        "mean": _mean(one.others),
        "difference": "" if one.difference is None else _with_interval(one.difference, one.low, one.high),
        "differs": "yes" if one.is_biased else "no",
    }


def _mean(sample: Sample | None) -> str:
    return "" if sample is None else _with_interval(sample.mean, sample.low, sample.high)


def _with_interval(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.3g}" if low is None or high is None else f"{value:.3g} [{low:.3g}, {high:.3g}]"
