"""Configuration files: overrides, and one clear message for each mistake."""

from pathlib import Path

import pytest

from flows.config_files import known_keys, load_config
from storage.errors import ConfigurationError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def config_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_valid(path):
    assert load_config(path).name == path.stem


def test_a_value_can_be_set_on_the_command_line(config_file):
    path = config_file("name: run\nalgorithm:\n  max_steps: 5\n")
    config = load_config(path, ["algorithm.max_steps=7", "data.shuffle=false", "algorithm.adam_betas=[0.8, 0.9]"])
    assert (config.algorithm.max_steps, config.data.shuffle, config.algorithm.adam_betas) == (7, False, (0.8, 0.9))


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("name: run\nalgoritm: {}\n", [], "unknown key 'algoritm'; did you mean 'algorithm'?"),
        ("name: run\nmax_steps: 3\n", [], "unknown key 'max_steps'; did you mean 'algorithm.max_steps'?"),
        ("name: run\nstore: {uri: x}\n", [], "unknown key 'store.uri'; did you mean 'store.url'?"),
        ("name: run\nzzz: 1\n", [], "unknown key 'zzz'; known here: name, seed, algorithm"),
        ("name: run\n", ["algorithm.max_step=3"], "did you mean 'algorithm.max_steps'?"),
        ("seed: 1\n", [], "'name' is missing"),
        ("name: run\nalgorithm: {max_steps: -3}\n", [], "algorithm.max_steps is -3: input should be greater"),
        ("name: run\nalgorithm: {learning_rate: fast}\n", [], "algorithm.learning_rate is 'fast'"),
        ("name: run\nalgorithm: 3\n", [], "algorithm is 3: expected a section"),
        ("name: My Run\n", [], "name is 'My Run'"),
        ("name: run\ndata: {num_prompts: 2}\n", [], "data.num_prompts is 2, less than"),
        ("name: run\n", ["async_rl.buffer_capacity=3"], "async_rl.buffer_capacity is 3"),
        ("- name\n", [], "expected keys such as"),
        ("name: [\n", [], "not valid YAML"),
        ("name: run\n", ["max_steps"], "expected key=value"),
        ("name: run\n", ["name.first=x"], "'name' is a value, not a section"),
    ],
)
def test_a_mistake_is_named_with_the_next_step(config_file, text, overrides, message):
    with pytest.raises(ConfigurationError) as caught:
        load_config(config_file(text), overrides)
    assert message in str(caught.value)


def test_all_mistakes_are_told_at_once(config_file):
    with pytest.raises(ConfigurationError) as caught:
        load_config(config_file("name: run\nseed: -1\ndata: {sed: 3}\n"))
    assert "seed is -1" in str(caught.value)
    assert "unknown key 'data.sed'; did you mean" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml: no such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_runs_lie_in_the_home_unless_the_file_says_otherwise(config_file, tmp_path, monkeypatch):
    monkeypatch.setenv("MIDFLIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert load_config(config_file("name: run\n")).store.url == str(tmp_path / "home" / "store")
    assert load_config(config_file("name: run\nstore: {url: here}\n")).store.url == str(tmp_path / "here")
    assert load_config(config_file("name: run\nstore: {url: 's3://b/p'}\n")).store.url == "s3://b/p"


def test_every_known_key_can_be_found_in_the_reference():
    from flows.config_reference import config_reference

    text = config_reference()
    assert [key for key in known_keys() if f"`{key}`" not in text] == []
