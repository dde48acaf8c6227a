"""`run.json` is written once and keeps the first configuration, without secrets."""

import pytest

from storage.errors import NotFound, SnapshotCorrupt
from storage.filesystem import Store
from storage.identity import identity
from storage.layout import RunLayout
from storage.run_config import RunConfig
from storage.run_record import create_run_record, read_run_record

LAYOUT = RunLayout("demo")


def test_the_first_controller_records_the_run_and_later_ones_find_it(store: Store) -> None:
    config = RunConfig(name="demo")
    first = create_run_record(store, LAYOUT, config)
    second = create_run_record(store, LAYOUT, config.model_copy(update={"seed": 99}))
    assert first == second == read_run_record(store, LAYOUT)
    assert first.fingerprint == identity(config).fingerprint


def test_a_run_without_a_record_is_not_found_and_a_damaged_one_refused(store: Store) -> None:
    with pytest.raises(NotFound):
        read_run_record(store, LAYOUT)
    store.write(LAYOUT.run_json, b'{"name": "demo"}')
    with pytest.raises(SnapshotCorrupt, match=r"demo/run\.json: not a run record"):
        read_run_record(store, LAYOUT)
