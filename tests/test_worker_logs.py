"""The logs of a run's processes on their way to the flow run: newest first kept, bounded, nothing lost in silence."""

import logging

import pytest

from gpu_workers.narration import NarratedTrace
from gpu_workers.worker_logs import KEPT_RECORDS, LONGEST_MESSAGE, LogTail


@pytest.fixture
def tail():
    tail = LogTail("trainer 0")
    logging.getLogger().addHandler(tail)
    yield tail
    logging.getLogger().removeHandler(tail)


def messages(tail):
    return [(record["level"], record["message"]) for record in tail.take()[0]]


def test_own_records_count_from_info_and_those_of_others_from_warning(tail):
    logging.getLogger("gpu_workers.training").setLevel(logging.INFO)
    logging.getLogger("gpu_workers.training").info("ready")
    logging.getLogger("vllm.engine").setLevel(logging.INFO)
    logging.getLogger("vllm.engine").info("tick")
    logging.getLogger("vllm.engine").warning("out of blocks")
    assert messages(tail) == [("INFO", "ready"), ("WARNING", "out of blocks")]
    assert messages(tail) == []


def test_the_oldest_go_where_there_is_no_room_and_are_counted(tail):
    for number in range(KEPT_RECORDS + 5):
        tail.add("INFO", str(number))
    tail.extend([{"t": 0.0, "level": "INFO", "source": "generator 0", "message": "old"}], lost=2)
    records, lost = tail.take()
    assert len(records) == KEPT_RECORDS
    assert lost == 5 + 1 + 2
    assert tail.take() == ([], 0)


def test_a_message_is_cut_and_says_where_it_comes_from(tail):
    logging.getLogger("anything").error("x" * 10_000)
    [record] = tail.take()[0]
    assert len(record["message"]) == LONGEST_MESSAGE
    assert record["source"] == "trainer 0"


def test_only_rare_events_are_told_and_all_are_traced():
    traced, told = [], []

    class Trace:
        def record(self, event, **fields):
            traced.append(event)

    trace = NarratedTrace(Trace(), lambda level, message: told.append((level, message)))
    trace.record("group_sealed", group_id="0:1")
    trace.record("snapshot_attempt", outcome="completed", number=1, reason="")
    trace.record("snapshot_attempt", outcome="failed", number=2, reason="no answer")
    trace.record("generator_died", index=0, reason="killed", groups=3)
    assert traced == ["group_sealed", "snapshot_attempt", "snapshot_attempt", "generator_died"]
    assert told == [
        ("WARNING", "snapshot attempt 2 failed: no answer"),
        ("WARNING", "generator 0 died with 3 groups in flight: killed"),
    ]
