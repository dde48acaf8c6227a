"""What holds for every built-in environment, and the rules of each."""

import json
from copy import deepcopy

import gymnasium
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_workers.environments.games.frozen_lake import FrozenLake
from gpu_workers.environments.games.guess_letter import GuessLetter
from gpu_workers.environments.games.running_sum import RunningSum
from gpu_workers.environments.interface import Environment, Json, Step, reset_rng, turn_rng
from gpu_workers.environments.states import canonical_state
from gpu_workers.models.tokenizer import CharTokenizer

GAMES: list[Environment] = [GuessLetter(), RunningSum(), FrozenLake()]
ACTIONS = st.lists(st.sampled_from([*"abcho0579ldru", "", "abc", "<pad>"]), max_size=33)


def play(game: Environment, seed: int, actions: list[str], *, saved_between_turns: bool = False) -> list[Step]:
    """The steps of an episode up to its end, or its state taken through JSON between every two of them."""
    steps = [game.reset({}, reset_rng(seed))]
    for turn, action in enumerate(actions):
        if steps[-1].done:
            break
        state = steps[-1].state
        if saved_between_turns:
            state = json.loads(canonical_state(state, where=game.name))
        steps.append(game.step(state, action, turn_rng(seed, generation_index=3, turn=turn)))
    return steps


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
@given(seed=st.integers(0, 2**63 - 1), actions=ACTIONS)
@settings(max_examples=40, deadline=None)
def test_saving_the_state_between_every_two_turns_changes_nothing(game: Environment, seed: int, actions: list[str]):
    straight = play(game, seed, actions)
    assert play(game, seed, actions, saved_between_turns=True) == straight
    assert play(type(game)(), seed, actions) == straight
    assert len(straight) <= game.max_turns + 1
    assert all(CharTokenizer().encode(step.observation) or step.done for step in straight)


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
@given(seed=st.integers(0, 2**32), actions=ACTIONS)
@settings(max_examples=20, deadline=None)
def test_a_state_is_never_changed_in_place(game: Environment, seed: int, actions: list[str]):
    state: Json = game.reset({}, reset_rng(seed)).state
    for turn, action in enumerate(actions):
        before = deepcopy(state)
        step = game.step(state, action, turn_rng(seed, generation_index=0, turn=turn))
        assert state == before
        if step.done:
            break
        state = step.state


def won(game: Environment, noise: float, games: int = 200) -> float:
    """Mean reward of the demonstrated games."""
    total = 0.0
    for seed in range(games):
        step, turn = game.reset({}, reset_rng(seed)), 0
        while not step.done:
            rng = turn_rng(seed, generation_index=0, turn=turn)
            step = game.step(step.state, game.demonstrate(step.state, rng, noise), rng)
            total, turn = total + step.reward, turn + 1
    return total / games


@pytest.mark.parametrize("game", GAMES[:2], ids=lambda game: game.name)
def test_a_demonstration_without_noise_always_wins_and_noise_makes_it_worse(game: Environment):
    assert won(game, 0.0) == pytest.approx(1.0)
    assert won(game, 1.0) < won(game, 0.5) < 0.95


def test_a_demonstrated_walk_over_the_lake_arrives_more_often_than_a_blind_one():
    assert won(FrozenLake(), 0.0, games=60) > won(FrozenLake(), 1.0, games=60) + 0.1


def replies(game: Environment, task: Json, actions: list[str]) -> list[tuple[str, float, bool]]:
    """What the game answers to a row of actions."""
    state, heard = game.reset(task, reset_rng(1)).state, []
    for turn, action in enumerate(actions):
        step = game.step(state, action, turn_rng(1, generation_index=0, turn=turn))
        state = step.state
        heard.append((step.observation, step.reward, step.done))
    return heard


def test_a_guess_is_answered_by_where_the_secret_lies():
    heard = replies(GuessLetter(), {"secret": "c"}, ["h", "a", "zz", "c"])
    assert heard == [("<", 0.0, False), (">", 0.0, False), ("?", 0.0, False), ("", 1.0, True)]


def test_the_fourth_wrong_guess_ends_the_game_without_reward():
    assert replies(GuessLetter(), {"secret": "c"}, list("abde"))[-1] == ("<", 0.0, True)


@pytest.mark.parametrize("turns", [1, 5, 6])
def test_the_running_sum_pays_each_right_answer_its_share(turns: int):
    game = RunningSum()
    digits = game.reset({"turns": turns}, reset_rng(1)).state["digits"]
    right = [str(sum(digits[: n + 1]) % 10) for n in range(turns)]
    heard = replies(game, {"turns": turns}, ["x", *right[1:]])
    assert [reward for _, reward, _ in heard] == pytest.approx([0.0] + [1 / turns] * (turns - 1))
    assert [observation for observation, _, _ in heard] == [*(f"+{digit}=" for digit in digits[1:]), ""]
    assert [done for _, _, done in heard] == [False] * (turns - 1) + [True]


@pytest.mark.parametrize(
    ("game", "task", "message"),
    [
        (GuessLetter(), {"secret": "z"}, "secret 'z'; give one letter"),
        (GuessLetter(), {"secret": 3}, "secret 3; give one letter"),
        (RunningSum(), {"turns": 17}, "turns = 17; give a number from 1 to 16"),
        (RunningSum(), {"turns": "6"}, "turns = '6'"),
    ],
)
def test_a_task_that_is_not_the_environment_s_is_refused(game: Environment, task: Json, message: str):
    with pytest.raises(ValueError, match=message):
        game.reset(task, reset_rng(0))


def test_the_lake_is_gymnasium_s_own_move_for_move():
    lake, seed, moves = FrozenLake(), 5, "rddrdrrdld"
    foreign = gymnasium.make("FrozenLake-v1").unwrapped
    foreign.reset(seed=int(reset_rng(seed).integers(2**31)))
    for step, move in zip(play(lake, seed, list(moves), saved_between_turns=True)[1:], moves, strict=False):
        field, reward, terminated, _, _ = foreign.step("ldru".index(move))
        assert (step.state["game"]["field"], step.reward, step.done) == (field, reward, terminated)


def test_an_action_that_is_none_loses_a_turn_and_does_not_touch_the_lake_s_generator():
    first = FrozenLake().reset({}, reset_rng(2))
    lost = FrozenLake().step(first.state, "x", turn_rng(2, generation_index=0, turn=0))
    assert first.observation == "s...|.h.h|...h|h..g r0c0?"
    assert (lost.observation, lost.reward, lost.done) == ("? r0c0?", 0.0, False)
    assert lost.state == first.state | {"turn": 1}
