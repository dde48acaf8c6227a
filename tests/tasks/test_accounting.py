"""The audit reads a run's configuration and the order of its prompts from where the run has them."""

import pytest

from storage.errors import NoRestorableState, NotFound
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import ManifestLog
from storage.run_config import DataConfig
from tasks.accounting import audit, config_of, prompt_order


def test_every_epoch_visits_every_prompt_in_an_order_of_its_own():
    order = prompt_order(DataConfig(num_prompts=50, num_epochs=2))
    first, second = order(0), order(1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_without_shuffling_prompts_come_in_the_order_of_the_dataset():
    assert list(prompt_order(DataConfig(num_prompts=5, shuffle=False))(0)) == [0, 1, 2, 3, 4]


def test_the_configuration_is_that_of_the_newest_bundle(empty_run):
    empty_run.publish()
    assert config_of(empty_run.store, empty_run.layout) == empty_run.config


def test_a_bundle_of_nothing_skips_nothing(empty_run):
    empty_run.publish()
    assert audit(empty_run.store, empty_run.layout).problems == []


def test_a_bundle_of_a_process_that_left_no_trace_is_named(empty_run):
    bundle = empty_run.publish(train_steps=1)
    assert (
        f"1 bundles of processes without a trace: {bundle.sequence:08d}"
        in audit(empty_run.store, empty_run.layout).problems
    )


def test_a_run_that_published_nothing_cannot_be_accounted_for(tmp_path):
    store, layout = open_store(str(tmp_path)), RunLayout("run")
    with pytest.raises(NotFound):
        config_of(store, layout)
    ManifestLog(store, layout, "writer").claim()
    with pytest.raises(NoRestorableState, match="nothing to account for"):
        config_of(store, layout)
