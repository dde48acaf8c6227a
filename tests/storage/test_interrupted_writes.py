"""Power fails after any write: the store still holds the previous snapshot, and it restores."""

from collections.abc import Callable
from typing import Any

import pytest

from storage.errors import Fenced, StoreError, StoreOutcomeUnknown, StoreUnavailable
from storage.retention import Keep, retain


def _writes_of(action: Callable[[Any], Any], store: Any, open_run: Callable[..., Any], stopping: Any) -> int:
    counting = stopping(store, allowed=10_000, lands=False)
    run = open_run(counting, writer="counting", name="counted")
    run.log.claim()
    before = counting.writes
    action(run)
    return int(counting.writes - before)


def _snapshot(run: Any) -> Any:
    return run.snapshot(buffered=(1, 2, 3))


def _checkpoint(run: Any) -> Any:
    return run.checkpoint(1, buffered=(1, 2, 3))


@pytest.mark.parametrize("lands", [False, True], ids=["lost", "landed-unconfirmed"])
@pytest.mark.parametrize("action", [_snapshot, _checkpoint])
def test_after_every_prefix_of_the_writes_the_previous_bundle_restores(
    store: Any, open_run: Any, stopping: Any, action: Callable[[Any], Any], lands: bool
) -> None:
    total = _writes_of(action, store, open_run, stopping)
    assert total >= 9
    run = open_run(store, writer="steady").claim()
    for allowed in range(total):
        previous = run.snapshot(buffered=(1, 2))
        expected = run.read(previous).state
        power = stopping(store, allowed=10_000, lands=lands)
        dying = open_run(power, writer=f"dying {allowed}")
        dying.log.claim()
        power.allowed = power.writes + allowed
        with pytest.raises((StoreUnavailable, StoreOutcomeUnknown)):
            action(dying)
        published = lands and allowed == total - 1
        selection = open_run(store).select()
        assert selection.passed_over == ()
        if published:
            assert selection.target.writer == dying.log.writer
            assert run.read(selection.target).state.buffer[:2] == expected.buffer
            return
        assert selection.target == previous
        assert run.read(selection.target).state == expected
        with pytest.raises(Fenced):
            run.snapshot(buffered=(1,))
        run = open_run(store, writer=f"steady {allowed}").claim()


@pytest.mark.parametrize("lands", [False, True])
def test_after_every_prefix_of_a_retention_what_it_keeps_restores(
    store: Any, open_run: Any, stopping: Any, lands: bool
) -> None:
    problems = []
    for number, allowed in enumerate((0, 1, 2, 7, 15, 500)):
        power = stopping(store, allowed=10_000, lands=lands)
        run = open_run(power, writer=f"writer {number}").claim()
        for step in (1, 2):
            newest = run.checkpoint(10 * number + step, buffered=(step,))
        power.allowed = power.writes + allowed
        retained = retain(power, run.layout, run.log, keep=Keep(1, 1))
        selection = open_run(store).select()
        assert selection.passed_over == ()
        assert selection.target == newest
        problems.append(bool(retained.problems))
    assert problems == [True, True, True, True, True, False]


def test_a_controller_that_lost_its_store_publishes_once_it_is_back(store: Any, open_run: Any, stopping: Any) -> None:
    power = stopping(store, allowed=10_000, lands=True)
    run = open_run(power, writer="patient").claim()
    for allowed in range(0, 9, 2):
        power.allowed = power.writes + allowed
        try:
            run.snapshot(buffered=tuple(range(allowed + 1)))
        except StoreError:
            power.allowed = 10_000
            run.snapshot(buffered=tuple(range(allowed + 1)))
        power.allowed = 10_000
        target = open_run(store).select().target
        assert len(run.read(target).state.buffer) == allowed + 1
