"""Every event that the code records is documented, and what is not documented stays readable."""

import ast
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.trace_columns import events_of, frame_of
from storage.trace_reader import read_events
from storage.trace_schema import COLUMNS, EVENTS, FIELDS, HEAD, OBJECTS, misfits

ROOT = Path(__file__).resolve().parents[2]
FORMATS = Path(__file__).parent / "formats"


def _recorded_names() -> set[str]:
    """First arguments of all calls of a `record` of a trace, and of the helpers that pass an event name on."""
    calls = (
        node
        for path in (ROOT / "gpu_workers").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "record"
        and "trace" in ast.unparse(node.func.value).lower()
        or node.func.attr == "_record"
        and len(node.args) > 1
    )
    return {
        call.args[0].value
        for call in calls
        if call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    }


def test_every_event_that_the_workers_record_is_documented() -> None:
    recorded = _recorded_names()
    assert {"group_published", "attempt_sealed", "run_stalled", "generator_died"} <= recorded
    assert recorded - EVENTS.keys() == set()
    # These are named by a variable, or recorded by the writer itself.
    assert EVENTS.keys() - recorded == {"trace_lost", "faults_planned"}


def test_every_documented_field_has_a_column_and_every_column_a_field() -> None:
    documented = {name for event in EVENTS.values() for name in (*event.fields, *event.optional)}
    assert documented - FIELDS.keys() == set()
    # What the writer makes of an event that is no JSON.
    assert FIELDS.keys() - documented == {"fields"}
    assert FIELDS.keys() >= OBJECTS


def test_the_events_of_a_recorded_run_are_as_documented() -> None:
    events = read_events(open_store(str(FORMATS / "trained-run")), RunLayout("demo"))
    assert len(events) == 83
    assert [problem for event in events for problem in misfits(event)] == []
    assert frame_of(events)["extra"].null_count() == len(events)


def test_events_and_fields_that_nobody_documented_are_told() -> None:
    assert misfits({"t": 1.0, "run_process": "p", "event": "odd"}) == ["event 'odd' is not known"]
    found = misfits({"t": 1.0, "run_process": "p", "event": "run_ended", "colour": "red"})
    assert found == ["run_ended: lacks reason", "run_ended: has unknown colour"]


def _event(number: int, **fields: Any) -> dict[str, Any]:
    return {"t": float(number), "run_process": "p", "event": "train_step", **fields}


def test_what_a_column_can_not_hold_is_in_extra() -> None:
    events = [
        _event(1, step=1, colour="red"),
        _event(2, step="one", metrics={"loss": 0.5}),
        _event(3, step=2**70, sequence=None, group_ids=["a", 1]),
    ]
    frame = frame_of(events)
    assert frame["step"].to_list() == [1, None, None]
    assert frame["metrics"].to_list() == [None, '{"loss": 0.5}', None]
    assert frame["extra"].to_list() == [
        '{"colour": "red"}',
        '{"step": "one"}',
        f'{{"step": {2**70}, "sequence": null, "group_ids": ["a", 1]}}',
    ]
    assert list(events_of(frame)) == events


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
NAMES = st.sampled_from(["train_step", "group_published", "unheard_of"])
KEYS = st.sampled_from([*sorted(FIELDS), "colour", "shape"])


@given(st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=6)), max_size=6))
def test_any_event_comes_back_from_the_columns_as_it_was(drawn: list[tuple[str, dict[str, Any]]]) -> None:
    events = [{"t": 0.5, "run_process": "p", "event": name, **fields} for name, fields in drawn]
    frame = frame_of(events, first_line=7)
    assert frame.schema == dict(COLUMNS)
    assert frame["line"].to_list() == list(range(7, 7 + len(events)))
    assert list(events_of(frame)) == events
    assert HEAD.keys() <= set(frame.columns)
