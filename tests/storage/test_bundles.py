"""A bundle is read back as it was captured, and each row is written once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from storage.errors import BrokenInvariant, Fenced, StoreUnavailable
from storage.filesystem import Store
from storage.logical_digest import logical_digest
from storage.manifests import Manifest
from storage.records import DroppedPrompt, Progress, SourcePosition, TrainedGroup


def _parts(manifest: Manifest) -> list[str]:
    return [entry.path for entry in manifest.files if entry.role == "part"]


def test_a_snapshot_before_the_first_step_has_no_model_payload(run: Any) -> None:
    manifest = run.snapshot(buffered=(1,))
    assert manifest.anchor.kind == "bootstrap"
    assert manifest.anchor.sequence is None
    assert {entry.role for entry in manifest.files} == {"part", "state"}


def test_a_bundle_is_read_back_as_it_was_captured(run: Any, make: Any) -> None:
    trained, trained_rows = make.buffered(50)
    state, rows = make.state(
        buffered=(1, 2),
        ledger=(3, 4),
        spares=(make.prompt(8), make.prompt(9)),
        dropped=(DroppedPrompt(make.prompt(5), "data failure", 2),),
        trained=(TrainedGroup(1, 0, trained),),
        progress=Progress(
            train_steps=1, trainer_version=1, source=SourcePosition(1, 9), stamps=True, next_order=3, shortfall={2: 1}
        ),
    )
    rows |= trained_rows
    manifest = run.writer.write(run.bundle(state, rows))
    bundle = run.read(manifest)
    assert bundle.state == state
    assert bundle.rows == rows
    assert [handle.batch.slice(handle.index, 1) for handle in bundle.rows.values()] == [
        rows[row_id].batch.slice(rows[row_id].index, 1) for row_id in bundle.rows
    ]
    assert manifest.logical_digest == logical_digest(bundle.state, bundle.rows)


def test_an_empty_state_is_a_whole_bundle(run: Any, make: Any) -> None:
    state, rows = make.state()
    bundle = run.read(run.writer.write(run.bundle(state, rows)))
    assert bundle.state == state
    assert bundle.rows == {}


def test_a_second_snapshot_writes_only_new_rows(run: Any) -> None:
    first = run.snapshot(buffered=(1, 2, 3))
    second = run.snapshot(buffered=(1, 2, 3, 4))
    assert _parts(second)[0] == _parts(first)[0]
    assert [entry.rows for entry in second.files if entry.role == "part"] == [6, 2]
    assert {group.prompt.prompt_id for group in run.read(second).state.buffer} == {1, 2, 3, 4}


def test_a_row_whose_content_changed_is_written_again(run: Any, make: Any) -> None:
    run.snapshot(buffered=(1,))
    group, rows = make.buffered(1, salt=100)
    state, _ = make.state()
    manifest = run.writer.write(run.bundle(replace(state, buffer=(group,)), rows))
    assert run.read(manifest).rows == rows


def test_the_logical_digest_does_not_depend_on_how_rows_lie_in_parts(
    run: Any, make: Any, open_run: Callable[..., Any], memory_store: Store
) -> None:
    run.snapshot(buffered=(1,))
    incremental = run.snapshot(buffered=(1, 2))
    whole = open_run(memory_store, writer="other").claim().snapshot(buffered=(1, 2))
    assert len(_parts(incremental)) == 2
    assert len(_parts(whole)) == 1
    assert incremental.logical_digest == whole.logical_digest


def test_a_part_that_is_mostly_dead_is_rewritten(run: Any) -> None:
    many = run.snapshot(buffered=tuple(range(10)))
    few = run.snapshot(buffered=(0, 1))
    assert not set(_parts(few)) & set(_parts(many))
    assert run.writer.pinned_parts() == set(_parts(few))


def test_restored_rows_are_not_written_again(run: Any, open_run: Callable[..., Any]) -> None:
    first = run.snapshot(buffered=(1, 2))
    resumed = open_run(run.store, writer="second").claim()
    resumed.writer.adopt(resumed.read(first).placements)
    second = resumed.snapshot(buffered=(1, 2))
    assert _parts(second) == _parts(first)
    assert second.logical_digest == first.logical_digest
    assert second.sequence > first.sequence


def test_two_controllers_never_write_one_name(run: Any, open_run: Callable[..., Any]) -> None:
    first = run.snapshot(buffered=(1,))
    second = open_run(run.store, writer="second").claim().snapshot(buffered=(1,))
    assert not {entry.path for entry in first.files} & {entry.path for entry in second.files}


def test_a_failed_publication_leaves_parts_that_the_next_attempt_uses(
    run: Any, open_run: Callable[..., Any], stopping: Callable[..., Any]
) -> None:
    power = stopping(run.store, allowed=3, lands=False)
    failing = open_run(power, writer="second")
    failing.log.claim()
    with pytest.raises(StoreUnavailable):
        failing.snapshot(buffered=(1, 2))
    left = [path for path in run.store.list(run.layout.parts)]
    assert failing.writer.pinned_parts() == set(left)
    power.allowed = 1000
    assert _parts(failing.snapshot(buffered=(1, 2))) == left


def test_a_fenced_writer_publishes_nothing(run: Any, open_run: Callable[..., Any]) -> None:
    before = run.snapshot(buffered=(1,))
    open_run(run.store, writer="second").claim()
    with pytest.raises(Fenced, match="'first' was fenced by 'second'"):
        run.snapshot(buffered=(1, 2))
    assert run.select().target == before


def test_rows_that_the_state_does_not_refer_to_stop_the_run(run: Any, make: Any) -> None:
    state, rows = make.state(buffered=(1,))
    _, extra = make.buffered(2)
    with pytest.raises(BrokenInvariant, match="2 rows were captured that the state does not refer to"):
        run.writer.write(run.bundle(state, rows | extra))
    rows.pop("e0-p1_g0")
    with pytest.raises(BrokenInvariant, match="1 rows that were not captured"):
        run.writer.write(run.bundle(state, rows))
    assert run.store.list(run.layout.parts) == []


def test_a_row_under_another_rows_name_stops_the_run(run: Any, make: Any) -> None:
    state, rows = make.state(buffered=(1,))
    rows["e0-p1_g0"], rows["e0-p1_g1"] = rows["e0-p1_g1"], rows["e0-p1_g0"]
    with pytest.raises(BrokenInvariant, match="e0-p1_g0 was captured as"):
        run.writer.write(run.bundle(state, rows))


def test_a_group_with_two_owners_is_never_written(run: Any, make: Any) -> None:
    state, rows = make.state(buffered=(1,), spares=(make.prompt(1),))
    with pytest.raises(BrokenInvariant, match="e0-p1 has 2 owners: replay buffer, spare prompts"):
        run.writer.write(run.bundle(state, rows))


def test_a_manifest_counts_what_a_restart_reuses(run: Any, make: Any) -> None:
    state, rows = make.state(buffered=(1, 2), ledger=(3, 4))
    counts = run.writer.write(run.bundle(state, rows)).counts
    assert counts["buffered_groups"] == 2
    assert counts["buffered_tokens"] == 8
    assert counts["reusable_siblings"] == counts["sealed_siblings"] == counts["running_attempts"] == 2
    assert counts["reusable_tokens"] == 4
    assert (counts["training_rows"], counts["staged_calls"]) == (4, 2)


def test_a_manifest_holds_no_secret(run: Any, make: Any) -> None:
    state, rows = make.state()
    store = run.config.store.model_copy(update={"url": "s3://user:sesame@bucket/path"})
    config = run.config.model_copy(update={"store": store})
    manifest = run.writer.write(run.bundle(state, rows, config=config))
    assert manifest.config["store"]["url"] == "s3://<redacted>@bucket/path"
    assert b"sesame" not in run.store.read(run.layout.manifest(manifest.sequence))
