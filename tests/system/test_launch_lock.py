"""In a real Ray cluster one caller at a time starts or ends a run's actors, and nobody ends what another started."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray

from gpu_workers.launch import end_runtime, launch_runtime
from gpu_workers.launch_lock import launch_lock
from gpu_workers.runtime_names import CONTROLLER, actors_of, named
from storage.errors import RunAlreadyLive
from storage.run_config import RunConfig

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # Ray warns on import

HOLD = """
import sys, time, ray
from gpu_workers.launch_lock import launch_lock
ray.init(address=sys.argv[1], log_to_driver=False)
with launch_lock("demo", "the process that is killed"):
    print("held", flush=True)
    time.sleep(600)
"""


class StandIn:
    """A controller that only says who it is."""

    def describe(self):
        return {"driver": "train-demo", "incarnation": "inc-1"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray of this module."""
    ray.init(address="local", num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def controller(cluster):
    actor = ray.remote(StandIn).options(**named("demo", CONTROLLER), num_cpus=0).remote()
    ray.get(actor.describe.remote())
    yield actor
    ray.kill(actor)


def test_a_launch_is_held_by_one_at_a_time_and_refused_to_others_by_its_name(cluster):
    with launch_lock("demo", "first"):
        with (
            pytest.raises(RunAlreadyLive, match="is being started or ended by first"),
            launch_lock("demo", "second", patience_s=0),
        ):
            pass
        with launch_lock("another-run", "second", patience_s=0):
            pass
    with launch_lock("demo", "second"):
        assert actors_of("demo") == {}


def test_a_launch_whose_process_is_killed_is_free_again(cluster):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, cluster], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunAlreadyLive, match="the process that is killed"), launch_lock("demo", "me", patience_s=0):
        pass
    holder.kill()
    holder.communicate()
    with launch_lock("demo", "me"):
        pass


def test_a_controller_that_was_started_meanwhile_is_left_alone(cluster, controller, tmp_path):
    config = RunConfig.model_validate({"name": "demo", "store": {"url": str(tmp_path)}})
    with pytest.raises(RunAlreadyLive, match=r"driven by train-demo \(incarnation inc-1\)"):
        launch_runtime(config, incarnation="inc-2", model_dir=tmp_path, launcher="second")
    end_runtime("demo", incarnation="inc-0", caller="the driver before")
    assert CONTROLLER in actors_of("demo")
    end_runtime("demo", incarnation="inc-1", caller="its own driver")
    assert actors_of("demo") == {}
