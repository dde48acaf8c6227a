"""`midflight trace --compact`: what is over becomes Parquet, and every answer stays the same."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import MISTAKE

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """The only trace of run `demo` of this home."""
    return tmp_path / "home" / "store" / "demo" / "trace" / "incarnation-1.jsonl"


def test_a_trace_that_may_still_be_written_stays_and_one_that_is_over_becomes_parquet(
    midflight: Run, trace_file: Path
) -> None:
    question = "SELECT event, count(*) AS n FROM trace GROUP BY event ORDER BY event"
    before = json.loads(midflight("query", "demo", question, "--json")[1]), midflight("trace", "demo")
    os.utime(trace_file)
    code, shown, _ = midflight("trace", "demo", "--compact")
    assert (code, "did not say that it ended" in shown, trace_file.exists()) == (0, True, True)
    os.utime(trace_file, (1.0, 1.0))
    code, shown, _ = midflight("trace", "demo", "--compact")
    assert (code, "83" in shown, trace_file.exists()) == (0, True, False)
    after = json.loads(midflight("query", "demo", question, "--json")[1]), midflight("trace", "demo")
    assert after == before
    assert "is compacted" in midflight("trace", "demo", "--compact")[1]


def test_an_unknown_run_has_no_trace_to_compact(midflight: Run) -> None:
    code, _, error = midflight("trace", "nobody", "--compact")
    assert (code, "nobody" in error) == (1, True)
    assert midflight("trace", "UPPER", "--compact")[0] == MISTAKE
