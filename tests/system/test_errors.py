"""What goes wrong is one clear message, an exit code that is not 0, and a store that is as it was."""

import shutil

import pytest

pytestmark = pytest.mark.system

MISTAKE, FAILURE = 2, 1


@pytest.fixture(scope="module")
def trained(midflight_home):
    """A run of four steps that has ended, in the shared home."""
    done = midflight_home.train("trained", algorithm__max_steps=4)
    assert done.code == 0, done.text
    return "trained"


def assert_clear(done, *, code, says):
    assert done.code == code, done.text
    assert says in done.text
    assert "Traceback" not in done.text


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        (None, "run.yaml: no such file"),
        ("name: run\nalgorithm: {learning_rte: 1}", "unknown key 'algorithm.learning_rte'; did you mean"),
        ("name: run\nalgorithm: {max_steps: -1}", "algorithm.max_steps is -1"),
        ("name: run\ngeneration: {max_new_tokens: 99}", "leaves no room for a prompt"),
    ],
)
def test_a_mistake_in_the_configuration_starts_nothing(new_home, yaml, says):
    midflight = new_home()
    if yaml is not None:
        (midflight.home.root / "run.yaml").write_text(yaml)
    assert_clear(midflight.run("train", "run.yaml"), code=MISTAKE, says=says)
    assert {path.name for path in midflight.home.root.iterdir()} <= {"run.yaml"}


def test_a_store_that_cannot_be_written_starts_nothing(new_home, train_command):
    midflight = new_home()
    (midflight.home.root / "file").write_text("")
    done = midflight.run(*train_command("run", {"store.url": str(midflight.home.root / "file" / "store")}))
    assert_clear(done, code=FAILURE, says="StoreUnsuitable")
    assert {path.name for path in midflight.home.root.iterdir()} == {"file"}


def test_a_run_that_is_trained_to_its_end_is_left_as_it_is(midflight_home, trained):
    before = midflight_home.files(trained)
    done = midflight_home.train(trained, algorithm__max_steps=4)
    assert_clear(done, code=0, says="trained is trained already: 4 steps")
    assert midflight_home.files(trained) == before


def test_a_changed_dataset_is_refused_by_the_keys_that_differ(midflight_home, trained):
    before = midflight_home.files(trained)
    done = midflight_home.train(trained, algorithm__max_steps=8, data__seed=99)
    assert_clear(done, code=FAILURE, says="data.seed: saved 17, now 99")
    assert midflight_home.files(trained) == before


def test_a_flipped_bit_is_found_by_verify_and_refused_by_train(midflight_home, trained, tmp_path):
    run = shutil.copytree(midflight_home.home.store, tmp_path / "store") / trained
    assert midflight_home.run("verify", trained, "--store", str(run.parent)).code == 0
    damaged = _flip_a_bit_of_every_model(run)
    verified = midflight_home.run("verify", trained, "--store", str(run.parent))
    assert_clear(verified, code=FAILURE, says="SnapshotCorrupt")
    before = _payload(run)
    done = midflight_home.train(trained, algorithm__max_steps=5, store__url=str(run.parent))
    assert_clear(done, code=FAILURE, says="manifest says sha256")
    assert all(path.parent.name in done.text.replace(" ", "") for path in damaged)
    assert before.items() <= _payload(run).items()
    assert not list(run.glob("checkpoints/step_000005*"))


def _flip_a_bit_of_every_model(run):
    models = sorted(run.glob("checkpoints/*/model.safetensors"))
    for path in models:
        data = bytearray(path.read_bytes())
        data[-5] ^= 4
        path.write_bytes(data)
    return models


def _payload(run):
    """Every file but the traces, which every start adds to."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.parent.name != "trace"}


def test_help_is_the_answer_to_no_command(new_home):
    done = new_home().run()
    assert done.code == MISTAKE
    assert "config-reference" in done.text
