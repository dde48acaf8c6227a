"""reasoning-gym's datasets as single-turn tasks."""

import json

import pytest

from gpu_workers.environments.plain_text import plain_text
from gpu_workers.environments.tasks import Task, build_task
from gpu_workers.models.tokenizer import END_TOKEN_ID, CharTokenizer
from storage.errors import ConfigurationError
from storage.run_config import DataConfig

TOKENIZER = CharTokenizer()


def chain_sum(**settings: int) -> Task:
    return build_task(DataConfig.model_validate({"task": "reasoning_gym:chain_sum", "num_prompts": 64, **settings}))


def test_a_prompt_depends_on_seed_and_ordinal_only():
    task = chain_sum()
    assert not task.is_multi_turn
    assert [task.prompt(n) for n in range(64)] == [chain_sum().prompt(n) for n in range(64)]
    assert task.fingerprint() == chain_sum().fingerprint() != chain_sum(seed=18).fingerprint()


def test_the_next_seed_s_dataset_is_not_this_one_moved_by_one():
    here, there = ({chain_sum(seed=seed).prompt(n)[0] for n in range(64)} for seed in (17, 18))
    assert len(here & there) < 8


def test_only_an_exact_and_ended_answer_scores():
    task = chain_sum()
    for ordinal in range(20):
        _, task_json = task.prompt(ordinal)
        right = TOKENIZER.encode(json.loads(task_json)["answer"])
        assert task.score(task_json, (*right, END_TOKEN_ID)) == 1.0
        assert task.score(task_json, (*right, END_TOKEN_ID, 5)) == 1.0
        assert task.score(task_json, right) == 0.0
        assert task.score(task_json, (*right, *TOKENIZER.encode(" or so"), END_TOKEN_ID)) == 0.0


def test_prompts_are_short_and_demonstrations_without_noise_are_right():
    task = chain_sum()
    question = TOKENIZER.decode(task.warm_start_prompt(5))
    expression = question.split(": ")[1].removesuffix(" =>")
    assert len(question) < 128
    assert int(TOKENIZER.decode(task.demonstration(5, 0.0)[:-1])) == eval(expression)
    assert task.demonstration(5, 0.0) == task.demonstration(5, 0.0)
    assert [task.demonstration(n, 0.9) for n in range(9)] != [task.demonstration(n, 0.0) for n in range(9)]


@pytest.mark.parametrize("task_json", ["not json", "[]", "{}", '{"task": "reasoning_gym:chain_sum", "ordinal": 64}'])
def test_a_task_that_is_not_its_own_is_refused(task_json: str):
    with pytest.raises(ValueError, match="reasoning_gym:chain_sum can't score the task"):
        chain_sum().score(task_json, [END_TOKEN_ID])


def test_an_ordinal_outside_the_dataset_is_refused():
    with pytest.raises(IndexError, match="not 64"):
        chain_sum().prompt(64)


def test_an_unknown_dataset_is_refused_by_its_name():
    with pytest.raises(ConfigurationError, match="can't make the dataset 'no_such'"):
        build_task(DataConfig(task="reasoning_gym:no_such"))


def test_foreign_text_is_made_of_the_tokenizer_s_characters():
    assert plain_text('How "many"\n\n  Letters?') == "how many letters?"
