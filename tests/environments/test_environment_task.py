"""Environments as datasets: prompts with seeds, and conversations for the warm start."""

import json
from collections.abc import Sequence

import pytest

from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.games.guess_letter import GuessLetter
from gpu_workers.environments.interface import Environment, Json, Step, reset_rng
from gpu_workers.environments.tasks import build_task
from gpu_workers.models.tokenizer import END_TOKEN_ID, CharTokenizer
from storage.errors import ConfigurationError, DataFailure
from storage.run_config import DataConfig

TOKENIZER = CharTokenizer()


class Loud(Environment):
    """Shouts, which the tokenizer can't read."""

    name = "loud"

    def reset(self, task: Json, rng: object) -> Step:
        return Step({}, "WHAT")

    def step(self, state: Json, action: str, rng: object) -> Step:
        return Step({}, "", done=True)


class Quiet(Loud):
    """Has nothing to say."""

    name = "quiet"

    def reset(self, task: Json, rng: object) -> Step:
        return Step({}, "")


class Silent(Loud):
    """Has no demonstrations."""

    name = "silent"

    def reset(self, task: Json, rng: object) -> Step:
        return Step({}, "say")


def task(name: str = "guess15x4", **settings: int) -> EnvironmentTask:
    built = build_task(DataConfig.model_validate({"task": name, "num_prompts": 64, **settings}))
    assert isinstance(built, EnvironmentTask)
    return built


def text(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(tokens)


def test_a_prompt_is_the_first_observation_and_names_environment_version_seed_and_task():
    tokens, task_json = task("running_sum?turns=6").prompt(3)
    fields = json.loads(task_json)
    assert (fields["environment"], fields["version"], fields["task"]) == ("running_sum", 1, {"turns": 6})
    first = task("running_sum").environment.reset(fields["task"], reset_rng(fields["seed"]))
    assert text(tokens) == first.observation
    assert len(first.state["digits"]) == 6
    assert task_json == json.dumps(fields, sort_keys=True, separators=(",", ":"))


def test_each_prompt_has_a_seed_of_its_own_that_depends_on_seed_and_ordinal_only():
    seeds = [json.loads(task().prompt(n)[1])["seed"] for n in range(64)]
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [json.loads(task().prompt(n)[1])["seed"] for n in range(64)]
    assert not set(seeds) & {json.loads(task(seed=18).prompt(n)[1])["seed"] for n in range(64)}


def test_the_fingerprint_covers_name_version_seed_size_and_fields(monkeypatch: pytest.MonkeyPatch):
    before = task("running_sum").fingerprint()
    others = [task(), task("running_sum?turns=5"), task("running_sum", seed=18), task("running_sum", num_prompts=65)]
    assert before not in [other.fingerprint() for other in others]
    assert task("running_sum").fingerprint() == before
    newer = task("running_sum")
    monkeypatch.setattr(type(newer.environment), "version", 2)
    assert newer.fingerprint() != before


@pytest.mark.parametrize("name", ["guess15x4", "running_sum", "frozen_lake"])
def test_warm_starts_are_repeatable_and_show_all_turns(name: str):
    first, again = task(name), task(name)
    prompts = [first.warm_start_prompt(n) for n in range(100)]
    assert prompts == [again.warm_start_prompt(n) for n in range(100)]
    assert [first.demonstration(n, 0.3) for n in range(100)] == [again.demonstration(n, 0.3) for n in range(100)]
    assert {prompt.count(END_TOKEN_ID) for prompt in prompts} >= {0, 1, 2, 3}
    assert all(answer[-1] == END_TOKEN_ID for answer in (first.demonstration(n, 0.3) for n in range(100)))


def test_a_warm_start_s_conversation_is_what_a_rollout_of_the_same_actions_sees():
    for ordinal in range(50):
        *turns, last = text(task("running_sum").warm_start_prompt(ordinal)).split("<end>")
        digits = [int(said[1]) for said in [*turns, last]]
        assert all(said == f"+{digit}=" + said[3:] for said, digit in zip([*turns, last], digits, strict=True))
        assert all(len(said) == 4 for said in turns)
        assert text(task("running_sum").demonstration(ordinal, 0.0)) == f"{sum(digits) % 10}<end>"


def test_a_completion_has_no_score():
    with pytest.raises(ValueError, match="'guess15x4' rewards its turns"):
        task().score("{}", [END_TOKEN_ID])


def test_an_action_is_the_text_before_the_first_end_token():
    h, i = TOKENIZER.encode("hi")
    assert task().action_text([h, END_TOKEN_ID, i]) == "h"
    assert task().action_text([h, i]) == "hi"
    assert task().action_text([END_TOKEN_ID]) == ""


def test_sort8_has_one_turn_and_an_environment_many():
    assert not build_task(DataConfig()).is_multi_turn
    assert task().is_multi_turn
    assert isinstance(task().environment, GuessLetter)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chess", r"'chess', .*one of \['sort8'\].*'reasoning_gym:<dataset>'.*'guess15x4'"),
        ("guess15x4?secret=z", r"data\.task is 'guess15x4\?secret=z': guess15x4 has the secret 'z'"),
        ("running_sum?turns=0", r"turns = 0; give a number"),
        ("running_sum?turns", r"write name\?field=value"),
        ("running_sum?turns=5&turns=6", r"gives a field twice"),
        ("no_such_module:Game", r"'no_such_module:Game' can't be imported"),
    ],
)
def test_a_task_that_can_not_work_is_refused_by_its_name(name: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        build_task(DataConfig(task=name))


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of this module's own environments."""
    import sys
    from types import ModuleType

    module = ModuleType("foreign_environments")
    for kind in (Loud, Quiet, Silent):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "foreign_environments", module)
    return "foreign_environments"


def test_an_observation_that_the_tokenizer_lacks_is_refused_with_the_way_out(foreign: str):
    with pytest.raises(DataFailure, match=r"'loud' shows what .* can't read: .*\['A', 'H', 'T', 'W'\].*plain_text"):
        task(f"{foreign}:Loud").prompt(0)


def test_an_environment_that_shows_nothing_at_first_is_refused(foreign: str):
    with pytest.raises(ConfigurationError, match="'quiet' starts with the observation ''"):
        task(f"{foreign}:Quiet")


def test_an_environment_without_demonstrations_says_how_to_do_without(foreign: str):
    with pytest.raises(ConfigurationError, match="'silent' shows no actions: set policy.warm_start_steps to 0"):
        task(f"{foreign}:Silent").demonstration(0, 0.1)
