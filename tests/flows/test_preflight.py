"""What is found out before anything is started."""

import pytest

from flows.home import Home
from flows.preflight import check, refuse_another_dataset, refuse_when_live, trained_steps
from gpu_workers.environments.tasks import build_task
from storage.errors import ConfigurationError, DatasetChanged, StoreUnsuitable
from storage.filesystem import open_store
from storage.identity import redacted
from storage.layout import RunLayout
from storage.manifests import ManifestDraft, ManifestLog
from storage.run_config import RunConfig


@pytest.fixture
def config(tmp_path):
    def make(**sections):
        return RunConfig.model_validate({"name": "run", "store": {"url": str(tmp_path / "store")}, **sections})

    return make


@pytest.fixture
def saved(config):
    """A run with a trainer checkpoint of step 5."""
    log = ManifestLog(open_store(config().store.url), RunLayout("run"), "writer")
    log.claim()
    fingerprint = build_task(config().data).fingerprint()
    log.append(
        ManifestDraft(kind="trainer_checkpoint", step=5, config=redacted(config()), dataset_fingerprint=fingerprint)
    )


def test_a_good_configuration_passes_and_leaves_no_run(config):
    check(config())
    assert not open_store(config().store.url).list("run")


def test_a_bad_store_is_refused(config, tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreUnsuitable):
        check(config())


@pytest.mark.parametrize("sections", [{"data": {"task": "chess"}}, {"policy": {"model": "/no/model"}}])
def test_an_unknown_task_or_model_is_refused(config, sections):
    with pytest.raises(ConfigurationError):
        check(config(**sections))


@pytest.mark.usefixtures("saved")
def test_the_dataset_of_a_run_stays_the_same(config):
    refuse_another_dataset(config(algorithm={"max_steps": 900}))
    with pytest.raises(DatasetChanged, match=r"data\.num_prompts: saved 4096, now 5000"):
        refuse_another_dataset(config(data={"num_prompts": 5000}))


@pytest.mark.usefixtures("saved")
def test_the_steps_of_the_newest_checkpoint_are_trained(config):
    assert trained_steps(config()) == 5


def test_a_new_run_has_no_dataset_and_no_steps_yet(config):
    refuse_another_dataset(config())
    assert trained_steps(config()) == 0


def test_without_a_running_ray_no_run_can_be_live(config, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refuse_when_live(config(), Home(tmp_path))
