"""Tasks: prompts as pure functions of (seed, ordinal), and scores."""

import pytest

from gpu_workers.environments.tasks import TASKS, Task, build_task
from gpu_workers.models.tokenizer import END_TOKEN_ID, CharTokenizer
from storage.errors import ConfigurationError
from storage.run_config import DataConfig

TOKENIZER = CharTokenizer()


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest) -> Task:
    """Each registered task in turn."""
    return build_task(DataConfig(task=request.param, num_prompts=64))


def test_a_prompt_depends_on_seed_and_ordinal_only(task: Task):
    again = build_task(DataConfig(num_prompts=64))
    assert [task.prompt(n) for n in range(64)] == [again.prompt(n) for n in reversed(range(64))][::-1]


def test_another_seed_gives_other_prompts_and_another_fingerprint(task: Task):
    other = build_task(DataConfig(num_prompts=64, seed=18))
    assert task.prompt(3) != other.prompt(3)
    assert task.fingerprint() != other.fingerprint()


def test_the_fingerprint_covers_the_size_of_the_dataset(task: Task):
    assert task.fingerprint() == build_task(DataConfig(num_prompts=64)).fingerprint()
    assert task.fingerprint() != build_task(DataConfig(num_prompts=65)).fingerprint()


def test_prompts_differ_and_lie_in_the_vocabulary(task: Task):
    prompts = [task.prompt(n)[0] for n in range(len(task))]
    assert len(set(prompts)) == len(task) == 64
    assert all(0 <= token < task.vocab_size for prompt in prompts for token in prompt)


@pytest.mark.parametrize("ordinal", [-1, 64])
def test_an_ordinal_outside_the_dataset_is_refused(task: Task, ordinal: int):
    with pytest.raises(IndexError, match=f"not {ordinal}"):
        task.prompt(ordinal)


def test_warm_start_prompts_are_not_those_of_the_dataset(task: Task):
    dataset = {task.prompt(n)[0] for n in range(len(task))}
    assert dataset.isdisjoint(task.warm_start_prompt(n) for n in range(2_000))


def test_demonstrations_are_repeatable_and_noise_makes_them_worse(task: Task):
    noisy = [task.demonstration(n, 0.5) for n in range(64)]
    assert noisy == [task.demonstration(n, 0.5) for n in range(64)]
    assert noisy != [task.demonstration(n, 0.0) for n in range(64)]
    assert all(answer[-1] in task.stop_token_ids for answer in noisy)


def test_sort8_shows_the_sorted_letters():
    task = build_task(DataConfig())
    letters = TOKENIZER.decode(task.warm_start_prompt(7)).removesuffix(">")
    assert TOKENIZER.decode(task.demonstration(7, 0.0)) == "".join(sorted(letters)) + "<end>"


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("abcdefgh<end>", 1.0),
        ("abcdefgh", 0.5),  # not ended: never exact
        ("abcdefhg<end>", 0.5 * 6 / 8),
        ("abcd<end>", 0.5 * 4 / 8),
        ("abcdefghabcdefgh<end>", 0.5 * 8 / 16),  # rambling does not pay
        ("abcdefgh<end>zzzz", 1.0),  # what follows the end is ignored
        ("<end>", 0.0),
        ("", 0.0),
    ],
)
def test_sort8_scores_positions_and_the_exact_answer(said: str, reward: float):
    task = build_task(DataConfig())
    tokens = [t for part in said.split("<end>") for t in (*TOKENIZER.encode(part), END_TOKEN_ID)][:-1]
    assert task.score('{"letters": "hgaecbdf"}', tokens) == pytest.approx(reward)


@pytest.mark.parametrize("task_json", ["not json", "[]", "{}", '{"letters": 3}'])
def test_sort8_refuses_a_task_that_is_not_its_own(task_json: str):
    with pytest.raises(ValueError, match="sort8 can't score the task"):
        build_task(DataConfig()).score(task_json, [END_TOKEN_ID])


def test_an_unknown_task_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"data\.task is 'chess', .* use one of \['sort8'\]"):
        build_task(DataConfig(task="chess"))
