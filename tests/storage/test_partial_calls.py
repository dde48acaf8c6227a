"""The tokens of a running model call are saved as they come: each once, and read back as one sequence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.filesystem import Store, open_store
from storage.forking import fork
from storage.layout import RunLayout
from storage.manifests import FileEntry, Manifest
from storage.records import Progress, RolloutState, RowKind
from storage.retention import Keep, retain
from storage.snapshot_reader import RestoredBundle, read_bundle


def _state(group: Any, call: Any) -> RolloutState:
    return RolloutState(Progress(), ledger=(group,), partial_calls=(call,))


def _parts(manifest: Manifest) -> list[FileEntry]:
    return [entry for entry in manifest.files if entry.kind == RowKind.PARTIAL_TOKENS]


def _sampled(bundle: RestoredBundle, column: str = "token_ids") -> list[Any]:
    """What the rows of each partial call hold, one after the other."""
    rows = [bundle.rows[chunk] for call in bundle.state.partial_calls for chunk in call.chunks]
    return [value for row in rows for value in row.batch.column(column)[row.index].as_py()]


def test_a_partial_call_is_read_back_as_it_was_captured(run: Any, make: Any) -> None:
    group, (call,), rows = make.prefix_group(1)
    manifest = run.writer.write(run.bundle(_state(group, call), rows))
    bundle = run.read(manifest)
    assert (bundle.state.partial_calls, bundle.rows) == ((call,), rows)
    assert _sampled(bundle) == [100, 101, 102, 103, 104]
    assert _sampled(bundle, "logprobs") == [-0.5, -1.5, -2.5, -3.5, -4.5]
    assert (manifest.counts["partial_calls"], manifest.counts["partial_tokens"]) == (1, 5)
    assert manifest.counts["reusable_tokens"] == 2, "those of the sealed sibling"


def test_a_second_snapshot_writes_only_the_tokens_that_are_new(run: Any, make: Any) -> None:
    group, (call,), rows = make.prefix_group(1, cuts=(3, 5))
    first = run.writer.write(run.bundle(_state(group, call), rows))
    longer, more = make.partial_call(group, 1, cuts=(3, 5, 9))
    second = run.writer.write(run.bundle(_state(group, longer), rows | more))
    old, new = _parts(second)
    assert [old] == _parts(first)
    assert (old.rows, new.rows) == (2, 1)
    bundle = run.read(second)
    assert [bundle.placements[chunk].part for chunk in longer.chunks] == [old, old, new]
    assert _sampled(bundle) == list(range(100, 109))


def test_a_call_without_a_new_token_costs_a_snapshot_no_part(run: Any, make: Any) -> None:
    group, (call,), rows = make.prefix_group(1)
    first = run.writer.write(run.bundle(_state(group, call), rows))
    second = run.writer.write(run.bundle(_state(group, call), rows))
    assert _parts(second) == _parts(first)


def test_chunks_that_were_merged_replace_their_parts(run: Any, make: Any) -> None:
    group, (call,), rows = make.prefix_group(1, cuts=(3, 5))
    first = run.writer.write(run.bundle(_state(group, call), rows))
    merged, own = make.partial_call(group, 1, cuts=(5,))
    others = {row_id: row for row_id, row in rows.items() if row.kind is not RowKind.PARTIAL_TOKENS}
    second = run.writer.write(run.bundle(_state(group, merged), others | own))
    assert not {part.path for part in _parts(second)} & {part.path for part in _parts(first)}
    assert _sampled(run.read(second)) == _sampled(run.read(first))
    assert run.writer.pinned_parts() == {entry.path for entry in second.files if entry.role == "part"}


def test_a_part_with_few_tokens_of_running_calls_is_rewritten(run: Any, make: Any) -> None:
    """Nine of ten calls have ended: what is left of their part moves to a new one, with what is new."""
    groups = [make.prefix_group(prompt) for prompt in range(10)]
    rows = {row_id: row for _, _, own in groups for row_id, row in own.items()}
    ledger = tuple(replace(group, batch=place) for place, (group, _, _) in enumerate(groups))
    calls = tuple(call for _, (call,), _ in groups)
    many = run.writer.write(run.bundle(RolloutState(Progress(), ledger=ledger, partial_calls=calls), rows))
    assert [part.rows for part in _parts(many)] == [20]
    longer, own = make.partial_call(ledger[0], 1, cuts=(3, 5, 6))
    few = run.writer.write(run.bundle(_state(ledger[0], longer), groups[0][2] | own))
    assert [part.rows for part in _parts(few)] == [3]
    assert not {part.path for part in _parts(few)} & {part.path for part in _parts(many)}


def test_restored_tokens_are_not_written_again(run: Any, make: Any, open_run: Callable[..., Any]) -> None:
    group, (call,), rows = make.prefix_group(1)
    first = run.writer.write(run.bundle(_state(group, call), rows))
    resumed = open_run(run.store, writer="second").claim()
    restored = resumed.read(first)
    resumed.writer.adopt(restored.placements)
    second = resumed.writer.write(resumed.bundle(restored.state, restored.rows))
    assert _parts(second) == _parts(first)
    assert second.logical_digest == first.logical_digest


def test_retention_frees_tokens_that_no_kept_snapshot_refers_to(run: Any, make: Any) -> None:
    group, (call,), rows = make.prefix_group(1)
    first = run.writer.write(run.bundle(_state(group, call), rows))
    ended = {row_id: row for row_id, row in rows.items() if row.kind is not RowKind.PARTIAL_TOKENS}
    second = run.writer.write(run.bundle(RolloutState(Progress(), ledger=(group,)), ended))
    done = retain(run.store, run.layout, run.log, keep=Keep(1, 1), pinned=run.writer.pinned_parts(), grace_s=0.0)
    assert done.retired == (first.sequence,)
    assert {part.path for part in _parts(first)} <= set(done.deleted)
    assert run.select().target == second


def test_a_fork_copies_partial_calls_with_their_tokens(run: Any, make: Any) -> None:
    group, (call,), rows = make.prefix_group(1)
    source = run.writer.write(run.bundle(_state(group, call), rows))
    made = fork(run.store, run.layout, source.sequence, "second").target
    copied = read_bundle(run.store, RunLayout("second"), made)
    assert (copied.state.partial_calls, _sampled(copied)) == ((call,), [100, 101, 102, 103, 104])
    assert made.logical_digest == source.logical_digest
    assert not {entry.path for entry in made.files} & {entry.path for entry in source.files}


def test_the_logical_digest_covers_every_token_of_a_running_call(run: Any, make: Any) -> None:
    group, (call,), rows = make.prefix_group(1)
    before = run.writer.write(run.bundle(_state(group, call), rows))
    row = rows[call.chunks[0]]
    plain = row.batch.slice(row.index, 1).to_pylist()[0]
    changed = make.row(RowKind.PARTIAL_TOKENS, {**plain, "token_ids": [100, 101, 999]})
    after = run.writer.write(run.bundle(_state(group, call), rows | {call.chunks[0]: changed}))
    assert after.logical_digest != before.logical_digest
    assert _sampled(run.read(after)) == [100, 101, 999, 103, 104]


@pytest.fixture(scope="module")
def fresh_store() -> Callable[[], Store]:
    names = iter(range(10**6))
    return lambda: open_store(f"memory://partial-calls-{next(names)}")


GROWTH = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from(["go on", "merge", "end"])), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(growth=GROWTH)
def test_however_calls_grow_and_are_merged_every_snapshot_holds_their_tokens_once(
    make_once: Any, new_run: Any, fresh_store: Callable[[], Store], growth: list[tuple[int, int, str]]
) -> None:
    """A snapshot after each of: a call samples some tokens, and its chunks are merged, or it ends."""
    make, run = make_once, new_run(fresh_store(), make_once).claim()
    groups = [replace(make.prefix_group(prompt)[0], batch=prompt) for prompt in range(3)]
    sealed = {row_id: row for prompt in range(3) for row_id, row in make.ledger_group(prompt)[1].items()}
    cuts: list[list[int]] = [[], [], []]
    known: set[str] = set()
    for which, tokens, then in growth:
        own = cuts[which]
        own += [tokens + (own[-1] if own else 0)] if tokens else []
        cuts[which] = {"go on": own, "merge": own[-1:], "end": []}[then]
        made = [make.partial_call(group, 1, cuts=tuple(c)) for group, c in zip(groups, cuts, strict=True) if c]
        rows = {row_id: row for _, chunks in made for row_id, row in chunks.items()}
        state = RolloutState(Progress(), ledger=tuple(groups), partial_calls=tuple(call for call, _ in made))
        manifest = run.writer.write(run.bundle(state, sealed | rows))
        bundle = run.read(manifest)
        assert (bundle.state, bundle.rows) == (state, sealed | rows)
        assert _sampled(bundle) == [token for c in cuts if c for token in range(100, 100 + c[-1])]
        parts = {part.path for part in _parts(manifest)}
        assert len(parts - known) <= 1, "all that is new lies in one part"
        known |= parts
