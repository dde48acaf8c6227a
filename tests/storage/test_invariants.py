"""The invariants I1 to I4 as set algebra over the tables of a bundle: each planted violation is named.

`formats/trained-run` was written by a real controller (fake trainer and generator): checkpoint 1 of step 2, snapshot 2
of step 3 on it, with a recorded batch, finished, unfinished, reserved and dropped prompts.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from storage.filesystem import open_store
from storage.invariants import InvariantChecks, StateTables, rows_off_index, stamps_off_cursor, two_owners
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from storage.records import Progress, PromptRef, RolloutState, SourcePosition
from storage.snapshot_reader import RestoredBundle, read_bundle

STORE = Path(__file__).parent / "formats" / "trained-run"
STEP_SIZE = 2


def order(epoch: int) -> list[int]:
    """The run shuffles 24 prompts with seed 17."""
    return [int(ordinal) for ordinal in np.random.default_rng([17, epoch]).permutation(24)]


@pytest.fixture(scope="module")
def bundles() -> tuple[RestoredBundle, RestoredBundle]:
    """Checkpoint and snapshot of the run."""
    store, layout = open_store(str(STORE)), RunLayout("demo")
    manifests = [slot for slot in read_log(store, layout) if isinstance(slot, Manifest)]
    checkpoint, snapshot = (read_bundle(store, layout, manifest) for manifest in manifests[1:])
    return checkpoint, snapshot


def _broken(bundles: tuple[RestoredBundle, RestoredBundle], **changes: Any) -> list[str]:
    """What is said of the snapshot with a changed state, after its checkpoint."""
    checkpoint, snapshot = bundles
    checks = InvariantChecks()
    assert checks.broken(checkpoint, order, step_size=STEP_SIZE) == []
    return checks.broken(replace(snapshot, state=replace(snapshot.state, **changes)), order, step_size=STEP_SIZE)


def test_what_a_controller_has_published_breaks_none(bundles: tuple[RestoredBundle, RestoredBundle]) -> None:
    assert _broken(bundles) == []


def _progress(state: RolloutState, **changes: Any) -> dict[str, Any]:
    return {"progress": replace(state.progress, **changes)}


VIOLATIONS: dict[str, tuple[Callable[[RolloutState], dict[str, Any]], str]] = {
    "a prompt that was passed and nobody owns": (
        lambda s: {"ledger": s.ledger[:-1]},
        r"I1: 1 prompts \(e0-p8\) are without an owner, but at most 0 were trained since the checkpoint before",
    ),
    "a cursor that ran ahead of what was saved": (
        lambda s: _progress(s, source=SourcePosition(0, 14)),
        r"I1: 2 prompts .* are without an owner, but at most 0",
    ),
    "a prompt that was not handed out": (
        lambda s: _progress(s, source=SourcePosition(0, 11)),
        r"I1: 1 prompts \(e0-p8\) are owned, but not handed out by the source yet",
    ),
    "a dropped prompt that was forgotten": (lambda s: {"dropped": ()}, r"I1: 1 prompts \(e0-p17\) are without"),
    "a trained prompt that came back": (
        lambda s: {"spares": (PromptRef(order(0)[0], 0, "0" * 64),)},
        r"I1: 1 prompts \(e0-p\d+\) are trained before the bundle's model and owned again",
    ),
    "a prompt of another epoch": (
        lambda s: {"spares": (PromptRef(3, 5, "0" * 64),)},
        r"I1: 1 prompts \(e5-p3\) are owned, but not handed out",
    ),
    "two owners": (
        lambda s: {"spares": (s.ledger[0].prompt,)},
        r"I2: group e0-p23 is owned by ledger and spare prompts",
    ),
    "the buffer and a recorded batch": (
        lambda s: {"buffer": (*s.buffer, replace(s.trained[0].group, target_step=4))},
        r"I2: group e0-p22 is owned by recorded batches and replay buffer",
    ),
    "a stamp that the cursor does not cover": (
        lambda s: _progress(s, sampler_cursor=3),
        r"I4: stamps \[4\] lie outside 3 to 3",
    ),
    "a stamp that was trained already": (
        lambda s: {"buffer": (replace(s.buffer[0], target_step=2), *s.buffer[1:])},
        r"I4: stamps \[2\] lie outside 3 to 4",
    ),
    "a stamp that was used twice": (
        lambda s: {"buffer": tuple(replace(group, target_step=4) for group in s.buffer)},
        r"I4: step 4 has 4 groups and 0 that never arrive, its batch is 2",
    ),
    "a cursor far ahead": (
        lambda s: _progress(s, sampler_cursor=2**60),
        r"I4: of the steps 3 to \d+ that were admitted, \d+ have no group",
    ),
    "a shortfall that nobody made": (
        lambda s: _progress(s, shortfall={3: 1}),
        r"I4: step 3 has 2 groups and 1 that never arrive, its batch is 2",
    ),
    "stamps of a sampler that gives none": (lambda s: _progress(s, stamps=False), r"I4: the sampler does not stamp"),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_each_planted_violation_is_named(bundles: tuple[RestoredBundle, RestoredBundle], violation: str) -> None:
    change, says = VIOLATIONS[violation]
    found = _broken(bundles, **change(bundles[1].state))
    assert any(pl.Series([line]).str.contains(says).item() for line in found), found


def test_rows_and_index_are_compared_both_ways(bundles: tuple[RestoredBundle, RestoredBundle]) -> None:
    tables = StateTables.of(bundles[1])
    assert list(rows_off_index(tables)) == []
    fewer = replace(tables, rows=tables.rows.filter(pl.col("row_id") != "e0-p20_g0"))
    assert list(rows_off_index(fewer)) == ["I3: 1 rows that are not there: e0-p20_g0"]
    no_calls = replace(tables, rows=tables.rows.filter(pl.col("kind") != "staged_calls"))
    assert list(rows_off_index(no_calls)) == ["I3: 1 rows that are not there: e0-p23_g0/a0/t0"]
    extra = pl.DataFrame({"row_id": ["e9-p9_g0"], "kind": ["training_rows"], "group_id": ["e9-p9"]})
    more = replace(tables, rows=pl.concat([tables.rows, extra]))
    assert list(rows_off_index(more)) == ["I3: 1 rows that the index does not refer to: e9-p9_g0"]
    twice = replace(tables, rows=pl.concat([tables.rows, tables.rows.filter(pl.col("row_id") == "e0-p20_g0")]))
    assert "I3: rows that are there twice: e0-p20_g0" in "\n".join(rows_off_index(twice))
    foreign = replace(tables, rows=tables.rows.with_columns(pl.lit("e0-p20").alias("group_id")))
    assert any("rows of other groups than the index says" in line for line in rows_off_index(foreign))


def test_tokens_of_running_calls_are_compared_with_the_index_too(run: Any, make: Any) -> None:
    group, (call,), rows = make.prefix_group(1)
    state = RolloutState(Progress(), ledger=(group,), partial_calls=(call,))
    tables = StateTables.of(run.read(run.writer.write(run.bundle(state, rows))))
    assert list(rows_off_index(tables)) == []
    first = pl.col("row_id") == call.chunks[0]
    fewer = replace(tables, rows=tables.rows.filter(~first))
    assert list(rows_off_index(fewer)) == [f"I3: 1 rows that are not there: {call.chunks[0]}"]
    group_id = pl.when(first).then(pl.lit("e0-p2")).otherwise("group_id").alias("group_id")
    foreign = replace(tables, rows=tables.rows.with_columns(group_id))
    assert list(rows_off_index(foreign)) == [f"I3: 1 rows of other groups than the index says: {call.chunks[0]}"]


def test_an_empty_state_breaks_none(bundles: tuple[RestoredBundle, RestoredBundle]) -> None:
    checkpoint, _ = bundles
    state = RolloutState(replace(checkpoint.state.progress, source=SourcePosition(), sampler_cursor=1))
    tables = StateTables.of(replace(checkpoint, state=state, rows={}))
    assert [*two_owners(tables), *rows_off_index(tables), *stamps_off_cursor(tables, STEP_SIZE)] == []
    assert InvariantChecks().broken(replace(checkpoint, state=state, rows={}), order, step_size=STEP_SIZE) == []


def test_more_prompts_can_t_have_been_trained_than_steps_took(bundles: tuple[RestoredBundle, RestoredBundle]) -> None:
    checkpoint, _ = bundles
    ahead = replace(checkpoint.state, progress=replace(checkpoint.state.progress, source=SourcePosition(0, 20)))
    found = InvariantChecks().broken(replace(checkpoint, state=ahead), order, step_size=STEP_SIZE)
    assert any("are without an owner, but at most 4 were trained since the start of the run" in line for line in found)


def test_without_the_order_of_the_dataset_the_tables_are_still_compared(
    bundles: tuple[RestoredBundle, RestoredBundle],
) -> None:
    _, snapshot = bundles
    lost = replace(snapshot, state=replace(snapshot.state, ledger=(), **_progress(snapshot.state, sampler_cursor=1)))
    found = InvariantChecks().broken(lost, None, step_size=STEP_SIZE)
    assert found
    assert not any(line.startswith("I1") for line in found)
