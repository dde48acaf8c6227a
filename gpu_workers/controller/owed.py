"""Turns finished work back into promises: for a bundle that saves no rows, or a restore that discards them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from storage.records import (
    AttemptStatus,
    BufferedGroup,
    GroupPhase,
    GroupStatus,
    LedgerGroup,
    PromptRef,
    RecoveryLevel,
    RolloutState,
    Sibling,
)
from storage.rows import RowHandle


def owe_buffered_again(group: BufferedGroup, attempts: tuple[int, ...], level: RecoveryLevel) -> LedgerGroup:
    """A finished group as an admitted promise with its stamp; every sibling starts with its next attempt."""
    siblings = tuple(Sibling(index, attempt + 1) for index, attempt in enumerate(attempts))
    return LedgerGroup(
        prompt=group.prompt,
        level=level,
        batch=-1 - group.order,
        order=group.order,
        siblings=siblings,
        phase=GroupPhase.ADMITTED,
        target_step=group.target_step,
        start_version=group.start_version,
    )


def owe_sealed_again(group: LedgerGroup) -> LedgerGroup:
    """An unfinished group without its sealed results; those siblings start with their next attempt."""
    siblings = tuple(
        s if s.sealed is None else replace(s, attempt=s.attempt + 1, status=AttemptStatus.RESERVED, sealed=None)
        for s in group.siblings
    )
    return replace(group, siblings=siblings, status=GroupStatus.GENERATING)


def attempts_of(group: BufferedGroup, rows: Mapping[str, RowHandle]) -> tuple[int, ...]:
    """The attempt each training row came from."""
    handles = [rows[row_id] for row_id in group.row_ids]
    return tuple(int(handle.batch.column("attempt")[handle.index].as_py()) for handle in handles)


def without_rows(
    state: RolloutState, rows: Mapping[str, RowHandle], level_of: Callable[[PromptRef], RecoveryLevel]
) -> RolloutState:
    """The same promises without the rows of groups to come: no prompt is lost, all of them are generated again.

    Recorded steps keep their rows: they can't be made again, since the steps that trained them are past.
    """
    owed = [owe_buffered_again(g, attempts_of(g, rows), level_of(g.prompt)) for g in state.buffer]
    ledger = sorted([*map(owe_sealed_again, state.ledger), *owed], key=lambda group: group.order)
    return replace(state, ledger=tuple(ledger), buffer=(), partial_calls=())
