"""Which ended `train` flow runs are started again by themselves."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Completed, Crashed, Failed, Running

from flows.resume_guard import judge, newest_bundle
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import ManifestLog
from storage.run_config import RunConfig

MAX = 3


def stopped(*states, labels=None):
    """A flow run that went through these states, and its history."""
    start = datetime.now(UTC) - timedelta(minutes=1)
    history = [state.model_copy(update={"timestamp": start + timedelta(seconds=n)}) for n, state in enumerate(states)]
    return FlowRun(flow_id=uuid4(), name="train-run", state=history[-1], labels=labels or {}), history


def verdict(*states, newest=7, labels=None, max_resumes=MAX):
    run, history = stopped(*states, labels=labels)
    return judge(run, history, newest, max_resumes=max_resumes)


def test_a_crashed_run_is_resumed_at_once():
    found = verdict(Running(), Crashed())
    assert (found.resume, found.delay_s) == (True, 0.0)


@pytest.mark.parametrize("state", [Failed(), Completed(), Running(), AwaitingRetry(), Cancelled()])
def test_what_did_not_crash_is_left_alone(state):
    assert not verdict(Running(), state).resume


@pytest.mark.parametrize("cancel", [Cancelling(), Cancelled()])
def test_what_a_person_cancelled_is_left_alone_though_its_process_crashed_over_it(cancel):
    found = verdict(Running(), cancel, Crashed())
    assert not found.resume
    assert "cancelled" in found.reason


def test_a_cancel_of_an_earlier_try_does_not_count():
    assert verdict(Running(), Cancelling(), Crashed(), AwaitingRetry(), Running(), Crashed()).resume


def test_resumes_in_vain_wait_longer_each_time_and_end():
    labels, delays = {}, []
    for _ in range(MAX):
        found = verdict(Running(), Crashed(), labels=labels)
        assert found.resume
        labels, delays = found.labels, [*delays, found.delay_s]
    assert delays == sorted(set(delays))
    found = verdict(Running(), Crashed(), labels=labels)
    assert not found.resume
    assert "cluster.max_resumes" in found.reason


def test_a_new_bundle_since_the_last_resume_starts_the_count_anew():
    labels = {}
    for newest in range(10):
        found = verdict(Running(), Crashed(), labels=labels, newest=newest)
        assert (found.resume, found.delay_s) == (True, 0.0)
        labels = found.labels


def test_a_store_that_does_not_answer_is_no_progress():
    labels = verdict(Running(), Crashed(), newest=5).labels
    found = verdict(Running(), Crashed(), newest=-1, labels=labels)
    assert found.delay_s > 0
    assert found.labels != labels
    assert verdict(Running(), Crashed(), newest=5, labels=found.labels).delay_s > found.delay_s


def test_none_is_resumed_where_the_configuration_says_so():
    assert not verdict(Running(), Crashed(), max_resumes=0).resume


def test_the_newest_bundle_is_read_from_the_store_and_claims_are_none(tmp_path):
    config = RunConfig.model_validate({"name": "run", "store": {"url": str(tmp_path)}})
    assert newest_bundle(config) == -1
    ManifestLog(open_store(str(tmp_path)), RunLayout("run"), "writer").claim()
    assert newest_bundle(config) == -1
