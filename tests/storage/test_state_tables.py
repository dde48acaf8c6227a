"""Any whole rollout state survives its tables unchanged; any broken promise in it is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import SnapshotCorrupt
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.logical_digest import logical_digest
from storage.manifests import Anchor, ManifestLog
from storage.records import (
    AttemptStatus,
    BufferedGroup,
    CallSampling,
    DroppedPrompt,
    GroupPhase,
    GroupStatus,
    LedgerGroup,
    PartialCall,
    Progress,
    PromptRef,
    RecoveryLevel,
    RolloutState,
    RowKind,
    SealedSibling,
    Sibling,
    SourcePosition,
    TrainedGroup,
    call_key,
    partial_key,
    rollout_id,
)
from storage.run_config import RunConfig
from storage.snapshot_reader import read_bundle
from storage.snapshot_writer import CapturedBundle, SnapshotWriter
from storage.state_checks import defects
from storage.state_tables import decode_state, encode_state

COUNT = st.integers(0, 2**62)
SMALL = st.integers(0, 9)
REWARD = st.floats(allow_nan=False)
SAVED_STATUS = [status for status in GroupStatus if status is not GroupStatus.FINALIZATION_UNKNOWN]


@st.composite
def prompts(draw: st.DrawFn) -> PromptRef:
    """Prompts that differ, since one owner each is a promise of the state."""
    number = draw(st.shared(st.builds(_Numbers), key="prompts")).next()
    return PromptRef(number, draw(SMALL), draw(st.text(max_size=8)))


class _Numbers:
    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


@st.composite
def siblings(draw: st.DrawFn, group_id: str, index: int) -> Sibling:
    """A sibling in any status, sealed ones with their calls."""
    status = draw(st.sampled_from(AttemptStatus))
    attempt = draw(SMALL)
    sealed = None
    if status is AttemptStatus.SEALED:
        masked = draw(st.booleans())
        turns = draw(st.integers(0 if masked else 1, 3))
        keys = tuple(call_key(rollout_id(group_id, index), attempt=attempt, turn=turn) for turn in range(turns))
        sealed = SealedSibling(keys, tuple(f"digest of {key}" for key in keys), draw(REWARD), masked, draw(COUNT))
    return Sibling(index, attempt, status, draw(SMALL), draw(SMALL), sealed)


@st.composite
def ledger_groups(draw: st.DrawFn, batch: int) -> LedgerGroup:
    """An admitted group (any siblings), or a reserved one (none sealed)."""
    prompt = draw(prompts())
    slots = tuple(draw(siblings(prompt.group_id, index)) for index in range(draw(st.integers(1, 3))))
    whole = all(sibling.sealed is not None for sibling in slots)
    fields: dict[str, Any] = {"prompt": prompt, "level": draw(st.sampled_from(RecoveryLevel)), "batch": batch}
    if any(sibling.sealed is not None for sibling in slots) or draw(st.booleans()):
        status = draw(st.sampled_from(SAVED_STATUS)) if whole else GroupStatus.GENERATING
        stamp = draw(st.none() | COUNT)
        return LedgerGroup(
            **fields,
            order=draw(COUNT),
            siblings=slots,
            phase=GroupPhase.ADMITTED,
            status=status,
            target_step=stamp,
            start_version=draw(COUNT),
        )
    return LedgerGroup(**fields, order=draw(COUNT), siblings=slots)


@st.composite
def buffered_groups(draw: st.DrawFn) -> BufferedGroup:
    """A finished group."""
    prompt = draw(prompts())
    rewards = tuple(draw(st.lists(REWARD, min_size=1, max_size=3)))
    return BufferedGroup(
        prompt=prompt,
        order=draw(COUNT),
        target_step=draw(st.none() | COUNT),
        start_version=draw(COUNT),
        row_ids=tuple(rollout_id(prompt.group_id, index) for index in range(len(rewards))),
        rewards=rewards,
        num_tokens=draw(COUNT),
        version_tokens=tuple(draw(st.lists(st.tuples(COUNT, COUNT), max_size=3))),
        claimed_by=draw(st.none() | COUNT),
    )


PROGRESS = st.builds(
    Progress,
    train_steps=st.integers(9, 2**62),
    trainer_version=COUNT,
    source=st.builds(SourcePosition, COUNT, COUNT),
    sampler=st.text(max_size=9),
    sampler_cursor=st.integers(-1, 2**62),
    stamps=st.none() | st.booleans(),
    next_batch=COUNT,
    next_order=COUNT,
    shortfall=st.dictionaries(COUNT, COUNT, max_size=3),
)


@st.composite
def partial_calls(draw: st.DrawFn, group: LedgerGroup) -> tuple[PartialCall, ...]:
    """What some of the running siblings of a group at level `prefix` have of their first call."""
    running = [s for s in group.siblings if s.status in (AttemptStatus.DISPATCHED, AttemptStatus.RESUMED)]
    chosen = [s for s in running if group.level is RecoveryLevel.PREFIX and draw(st.booleans())]
    return tuple(draw(_partial_call(rollout_id(group.group_id, s.generation_index), s.attempt)) for s in chosen)


@st.composite
def _partial_call(draw: st.DrawFn, rollout: str, attempt: int) -> PartialCall:
    key = call_key(rollout, attempt=attempt, turn=0)
    ends = sorted(draw(st.sets(st.integers(1, 2**31 - 1), min_size=1, max_size=3)))
    return PartialCall(
        rollout_id=rollout,
        attempt=attempt,
        turn=0,
        prompt_tokens=draw(COUNT),
        prompt_digest=draw(st.text(max_size=8)),
        sampling=draw(SAMPLING),
        chunks=tuple(partial_key(key, start=start, end=end) for start, end in zip([0, *ends], ends, strict=False)),
        num_tokens=ends[-1],
        finish_reason=draw(st.sampled_from(["", "stop", "length"])),
    )


SAMPLING = st.builds(
    CallSampling,
    kind=st.text(max_size=9),
    seed=st.integers(0, 2**63 - 1),
    temperature=REWARD,
    top_p=REWARD,
    stop_token_ids=st.lists(COUNT, max_size=2).map(tuple),
)


@st.composite
def states(draw: st.DrawFn) -> RolloutState:
    """Whole states."""
    progress = draw(PROGRESS)
    sizes = draw(st.lists(st.integers(1, 2), max_size=2))  # of the steps that lead to the newest one
    first = progress.train_steps - len(sizes) + 1
    places = [(first + nth, place) for nth, size in enumerate(sizes) for place in range(size)]
    ledger = tuple(draw(ledger_groups(batch)) for batch in range(draw(st.integers(0, 3))))
    return RolloutState(
        progress=progress,
        ledger=ledger,
        buffer=tuple(draw(st.lists(buffered_groups(), max_size=3))),
        spares=tuple(draw(st.lists(prompts(), max_size=2))),
        dropped=tuple(draw(st.lists(st.builds(DroppedPrompt, prompts(), st.text(), st.none() | COUNT), max_size=2))),
        trained=tuple(TrainedGroup(*place, draw(buffered_groups())) for place in places),
        partial_calls=tuple(call for group in ledger for call in draw(partial_calls(group))),
    )


def _files(state: RolloutState) -> dict[str, tuple[str, bytes]]:
    return {file.kind: (f"state/{file.kind}", file.data) for file in encode_state(state, [], writer="w")}


@settings(max_examples=40, deadline=None)
@given(state=states())
def test_any_whole_state_survives_its_tables(state: RolloutState) -> None:
    assert defects(state) == []
    decoded, places = decode_state(_files(state))
    assert decoded == state
    assert places == []
    assert logical_digest(decoded, {}) == logical_digest(state, {})


@settings(max_examples=15, deadline=None)
@given(numbers=st.lists(st.integers(0, 60), unique=True, max_size=9), split=st.integers(0, 9))
def test_any_state_with_rows_is_read_back_with_an_equal_logical_digest(
    make_once: Any, numbers: list[int], split: int
) -> None:
    make = make_once
    state, rows = make.state(
        buffered=tuple(numbers[:split]), ledger=tuple(numbers[split:]), progress=Progress(next_order=split)
    )
    state = replace(state, ledger=tuple(replace(group, batch=place) for place, group in enumerate(state.ledger)))
    store, layout = open_store(f"memory://{numbers}-{split}"), RunLayout("demo")
    log = ManifestLog(store, layout, "w")
    log.claim()
    bundle = CapturedBundle(
        "rollout_snapshot", 0, Anchor.bootstrap("x"), state, rows, 1.0, (), RunConfig(name="demo"), "dataset"
    )
    manifest = SnapshotWriter(store, layout, log).write(bundle)
    restored = read_bundle(store, layout, manifest)
    assert restored.state == state
    assert logical_digest(restored.state, restored.rows) == logical_digest(state, rows) == manifest.logical_digest
    assert {row.kind for row in restored.rows.values()} <= set(RowKind)


def _refused(state: RolloutState, says: str) -> None:
    with pytest.raises(SnapshotCorrupt, match=says):
        decode_state(_files(state))


def test_generation_indices_without_gaps_are_demanded(make: Any) -> None:
    group, _ = make.ledger_group(1)
    gap = replace(group, siblings=(group.siblings[0], replace(group.siblings[1], generation_index=2)))
    _refused(RolloutState(Progress(), ledger=(gap,)), r"e0-p1 has generation indices \[0, 2\]")
    _refused(RolloutState(Progress(), ledger=(replace(group, siblings=()),)), "generation indices")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": AttemptStatus.SEALED}, "is sealed without a result"),
        ({"sealed": SealedSibling(("k",), ("d",), 0.0, False, 1)}, "is dispatched, but holds a result"),
        (
            {"status": AttemptStatus.SEALED, "sealed": SealedSibling(("k",), (), 0.0, False, 1)},
            "sealed with 1 calls and 0 digests",
        ),
        (
            {"status": AttemptStatus.SEALED, "sealed": SealedSibling((), (), 0.0, False, 1)},
            "sealed with 0 calls",
        ),
    ],
)
def test_sealed_siblings_are_complete_and_others_empty(make: Any, change: dict[str, Any], says: str) -> None:
    group, _ = make.ledger_group(1, sealed=0)
    broken = replace(group, siblings=(replace(group.siblings[0], **change), group.siblings[1]))
    _refused(RolloutState(Progress(), ledger=(broken,)), says)


def test_groups_of_one_batch_share_their_admission(make: Any) -> None:
    one, _ = make.ledger_group(1, batch=4)
    other, _ = make.ledger_group(2, batch=4, target_step=2)
    _refused(RolloutState(Progress(), ledger=(one, other)), "e0-p1 and e0-p2 share batch 4")
    reserved = replace(other, phase=GroupPhase.RESERVED, target_step=None, start_version=None)
    unsealed = replace(reserved, siblings=(Sibling(0), Sibling(1)))
    _refused(RolloutState(Progress(), ledger=(one, unsealed)), "share batch 4")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"phase": GroupPhase.RESERVED}, "only reserved, but carries a stamp"),
        ({"start_version": None}, "admitted without a start version"),
        ({"status": GroupStatus.READY_TO_FINALIZE}, "ready_to_finalize with 2 unsealed siblings"),
        ({"status": GroupStatus.FINALIZATION_UNKNOWN}, "finalization_unknown, which is never saved"),
    ],
)
def test_phase_status_and_stamps_agree(make: Any, change: dict[str, Any], says: str) -> None:
    group, _ = make.ledger_group(1, sealed=0, **change)
    _refused(RolloutState(Progress(), ledger=(group,)), says)


def test_every_prompt_has_one_owner(make: Any) -> None:
    buffered, _ = make.buffered(1)
    entry, _ = make.ledger_group(1)
    _refused(RolloutState(Progress(), ledger=(entry,), buffer=(buffered,)), "2 owners: ledger, replay buffer")
    dropped = DroppedPrompt(make.prompt(1), "gone", None)
    _refused(RolloutState(Progress(), buffer=(buffered,), dropped=(dropped,)), "replay buffer, dropped prompts")


def test_a_row_belongs_to_one_group(make: Any) -> None:
    one, _ = make.buffered(1)
    other, _ = make.buffered(2)
    thief = replace(other, row_ids=one.row_ids)
    _refused(RolloutState(Progress(), buffer=(one, thief)), "row e0-p1_g0 is listed 2 times")
    short = replace(one, rewards=(0.5,))
    _refused(RolloutState(Progress(), buffer=(short,)), "2 rows and 1 rewards")


def test_trained_groups_lie_in_committed_steps_and_places_of_their_own(make: Any) -> None:
    one, _ = make.buffered(1)
    other, _ = make.buffered(2)
    _refused(RolloutState(Progress(), trained=(TrainedGroup(3, 0, one),)), "only 0 steps are committed")
    both = (TrainedGroup(1, 0, one), TrainedGroup(1, 0, other))
    _refused(RolloutState(Progress(train_steps=1), trained=both), "place 0 of step 1 is listed 2 times")
    holed = (TrainedGroup(1, 0, one), TrainedGroup(3, 0, other))
    _refused(RolloutState(Progress(train_steps=3), trained=holed), r"steps \[1, 3\], which do not lead to step 3")
    _refused(RolloutState(Progress(train_steps=4), trained=both[:1]), r"steps \[1\], which do not lead to step 4")
    _refused(RolloutState(Progress(train_steps=1), trained=(TrainedGroup(1, 1, one),)), "place 1 of the 1 of step 1")


def test_a_missing_table_is_never_no_entries(make: Any) -> None:
    files = _files(RolloutState(Progress()))
    del files["spare_prompts"]
    with pytest.raises(SnapshotCorrupt, match="spare_prompts"):
        decode_state(files)


def _with_partial(make: Any, **changes: Any) -> RolloutState:
    group, (call,), _ = make.prefix_group(1)
    return RolloutState(Progress(), ledger=(group,), partial_calls=(replace(call, **changes),))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout_id": "e0-p9_g0"}, "e0-p9_g0/a0/t0 is of no sibling in the ledger"),
        ({"rollout_id": "e0-p1_g0"}, "e0-p1_g0/a0/t0: its sibling is sealed"),
        ({"attempt": 1}, "e0-p1_g1/a1/t0: the attempt of its sibling is 0"),
        ({"turn": 1}, "t1: 0 finished turns of its sibling are saved"),
        ({"finish_reason": "tired"}, "it has finished for 'tired', expected one of '', 'stop', 'length'"),
        ({"num_tokens": 4}, "4 tokens in chunks that hold 5"),
        ({"chunks": (), "num_tokens": 0}, "0 tokens in chunks that hold 0"),
    ],
)
def test_a_partial_call_is_the_current_call_of_a_running_sibling(make: Any, changes: dict[str, Any], says: str) -> None:
    assert defects(_with_partial(make)) == []
    _refused(_with_partial(make, **changes), says)


@pytest.mark.parametrize(
    "chunks",
    [
        ("p0-3", "p4-5"),
        ("p3-5",),
        ("p0-3", "p0-3", "p3-5"),
        ("p3-5", "p0-3"),
        ("p0-3", "p3-3", "p3-5"),
        ("p00-3", "p3-5"),
        ("p0-3", "tail"),
        ("p0-3", "p3-" + "9" * 5000),
        ("p0-3", "p3-\u0665"),
    ],
)
def test_the_chunks_of_a_partial_call_hold_each_token_once_and_in_order(make: Any, chunks: tuple[str, ...]) -> None:
    named = tuple(f"e0-p1_g1/a0/t0/{chunk}" for chunk in chunks)
    _refused(_with_partial(make, chunks=named), "stands where its tokens from . on are expected")
    foreign = ("e0-p1_g1/a0/t0/p0-3", "e0-p1_g1/a0/t1/p3-5")
    _refused(_with_partial(make, chunks=foreign), "t1/p3-5 stands where its tokens from 3 on are expected")


def test_tokens_of_a_running_call_are_saved_at_level_prefix_only(make: Any) -> None:
    whole = _with_partial(make)
    lower = replace(whole, ledger=(replace(whole.ledger[0], level=RecoveryLevel.TURN),))
    _refused(lower, "its group is restored at level turn")


def test_a_sibling_has_one_partial_call_and_that_of_its_next_turn(make: Any) -> None:
    whole = _with_partial(make)
    _refused(
        replace(whole, partial_calls=whole.partial_calls * 2), "partial call of rollout e0-p1_g1 is listed 2 times"
    )
    group, episodes, _ = make.episode_group(2, turns=2)
    group = replace(group, level=RecoveryLevel.PREFIX)
    state = RolloutState(Progress(), ledger=(group,), episodes=episodes)
    first, _ = make.partial_call(group, 0)
    _refused(replace(state, partial_calls=(first,)), "t0: 2 finished turns of its sibling are saved")
    third, _ = make.partial_call(group, 0, turn=2)
    assert defects(replace(state, partial_calls=(third,))) == []
