"""`/run` of a NeMo Gym: requests and replies in the shapes of its public sources."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_workers.environments.gym_run import GymOutcome, episode_of_key, outcome_of, run_body
from gpu_workers.environments.gym_task import GymTask
from gpu_workers.environments.ports import EpisodeId
from gpu_workers.models.tokenizer import END_TOKEN_ID, CharTokenizer
from storage.errors import ConfigurationError, DataFailure, InfrastructureFailure
from storage.run_config import DataConfig

SHAPES = Path(__file__).parent / "gym_shapes"
EPISODE = EpisodeId("e0-p1_g2", 1)


def shape(name: str) -> dict[str, Any]:
    return json.loads((SHAPES / f"{name}.json").read_text())


def test_an_agent_is_sent_the_row_with_the_rollout_s_names_and_key() -> None:
    row = shape("agent_row")
    body = run_body(row, EPISODE)
    assert body["episode_id"] == {"rollout_id": "e0-p1_g2", "attempt": 1}
    assert (body["_ng_rollout_id"], body["_ng_attempt_index"]) == ("e0-p1_g2", 1)
    assert (body["expected_answer"], body["agent_ref"]) == (row["expected_answer"], row["agent_ref"])
    metadata = body["responses_create_params"]["metadata"]
    assert metadata["chat_template_kwargs"] == row["responses_create_params"]["metadata"]["chat_template_kwargs"]
    assert all(isinstance(value, str) for value in metadata.values())
    assert json.loads(metadata["extra_body"]) == {"skip_special_tokens": False, "midflight_rollout": "e0-p1_g2-a1"}


def test_an_environment_server_is_sent_nothing_but_episode_and_task() -> None:
    row = shape("environment_row")
    body = run_body(row, EPISODE)
    assert body.keys() == {"episode_id", "task"}
    assert body["task"]["task_id"] == row["task_id"]
    assert body["task"]["task_input"]["task_data"] == row["task_input"]["task_data"]
    params = body["task"]["task_input"]["responses_create_params"]
    assert params["metadata"]["midflight_rollout"] == "e0-p1_g2-a1"


def test_the_first_attempt_is_sent_as_an_object_too_and_its_bare_key_is_understood() -> None:
    first = EpisodeId("e0-p1_g2", 0)
    assert run_body(shape("agent_row"), first)["episode_id"] == {"rollout_id": "e0-p1_g2", "attempt": 0}
    assert episode_of_key("e0-p1_g2") == first
    assert episode_of_key("e0-p1_g2-a0") == first
    assert episode_of_key("e0-p1_g2-a12") == EpisodeId("e0-p1_g2", 12)


@pytest.mark.parametrize(
    ("row", "reply", "outcome"),
    [
        ("agent_row", "agent_reply", GymOutcome(1.0, masked=False)),
        ("environment_row", "environment_reply", GymOutcome(0.25, masked=True)),
        ("environment_row", "environment_turn_reply", GymOutcome(0.25, masked=False)),
    ],
)
def test_replies_come_to_a_reward_and_a_mask(row: str, reply: str, outcome: GymOutcome) -> None:
    assert outcome_of(shape(reply), shape(row), EPISODE, "sums") == outcome


def test_a_reply_may_name_its_episode_by_key() -> None:
    reply = {**shape("environment_reply"), "episode_id": "e0-p1_g2-a1"}
    assert outcome_of(reply, shape("environment_row"), EPISODE, "sums").reward == 0.25


@pytest.mark.parametrize(("terminal", "kind"), [(False, InfrastructureFailure), (True, DataFailure)])
def test_a_failed_episode_may_be_tried_again_unless_it_is_terminal(terminal: bool, kind: type[Exception]) -> None:
    reply = shape("environment_failure")
    reply["failure"]["terminal"] = terminal
    with pytest.raises(kind, match="'sums' could not play e0-p1_g2-a1: Episode admission timed out"):
        outcome_of(reply, shape("environment_row"), EPISODE, "sums")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"episode_id": {"rollout_id": "e0-p9_g0", "attempt": 1}},
            "asked for episode e0-p1_g2-a1 and .* for e0-p9",
        ),
        ({"episode_id": "e0-p1_g2"}, "answered for e0-p1_g2-a0"),
        ({"result": None}, "neither a result nor a failure"),
        ({"result": {"verification": {"reward": "good"}}}, "result.*unable to parse"),
        ({"episode_id": 7}, "episode_id"),
    ],
)
def test_a_reply_that_is_of_another_episode_or_none_is_refused_by_what_is_wrong(
    change: dict[str, Any], told: str
) -> None:
    with pytest.raises(DataFailure, match=told):
        outcome_of({**shape("environment_reply"), **change}, shape("environment_row"), EPISODE, "sums")


@pytest.mark.parametrize("reply", [{}, {"reward": None}, [], "no", {"reward": float("nan")}])
def test_an_agent_s_reply_without_a_reward_is_refused(reply: Any) -> None:
    with pytest.raises(DataFailure, match="see whether its version speaks this protocol"):
        outcome_of(reply, shape("agent_row"), EPISODE, "simple_agent")


def asking(asked: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": asked}, "agent_ref": {"name": "a"}}


def with_metadata(metadata: Any) -> dict[str, Any]:
    row = asking("1")
    return {**row, "responses_create_params": {**row["responses_create_params"], "metadata": metadata}}


def rows_in(path: Path, *rows: Any) -> DataConfig:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return DataConfig(task=f"gym:{path}", num_prompts=len(rows))


def test_a_file_of_rows_is_a_dataset_whose_prompts_name_their_agents(tmp_path: Path) -> None:
    task = GymTask(rows_in(tmp_path / "rows.jsonl", shape("agent_row"), shape("environment_row")))
    assert (len(task), task.agent(0), task.agent(1)) == (2, "simple_agent", "sums:train")
    assert task.agents == {"simple_agent", "sums:train"}
    tokens, task_json = task.prompt(0)
    assert tokens == CharTokenizer().encode("add1+2=")
    assert json.loads(task_json) == shape("agent_row")
    said = [("user", "1+2="), ("assistant", "3"), ("user", "2+2=")]
    assert task.chat_tokens(said) == (*CharTokenizer().encode("1+2=3"), END_TOKEN_ID, *CharTokenizer().encode("2+2="))
    changed = GymTask(rows_in(tmp_path / "rows.jsonl", shape("agent_row"), shape("agent_row")))
    assert changed.fingerprint() != task.fingerprint()


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (["not json"], "row 1 is no JSON"),
        ([{**asking("1"), "agent_ref": "a"}], "row 1 names no agent"),
        ([with_metadata("x")], "row 1 'metadata' is 'x', not an object of texts"),
        ([with_metadata({"a": 1})], "not an object of texts"),
        ([with_metadata({"extra_body": "{"})], "row 1 'metadata.extra_body' is no JSON"),
        ([with_metadata({"extra_body": "[1]"})], r"'metadata.extra_body' is '\[1\]', not a JSON object"),
        ([asking([{"role": "user", "content": 7}])], "holds more than text: '7'"),
        ([{"agent_ref": {"name": "a"}}], "row 1 has no object 'responses_create_params'"),
        ([{"responses_create_params": {"input": "1"}}], "row 1 names no agent"),
        (
            [{"responses_create_params": {"input": "1", "tools": [{"type": "function"}]}, "agent_ref": {"name": "a"}}],
            "asks for 'tools'",
        ),
        ([asking(7)], "row 1 'input' or 'messages' is int"),
        (
            [
                {
                    "responses_create_params": {"input": [{"role": "user", "content": [{"image_url": "x"}]}]},
                    "agent_ref": {"name": "a"},
                }
            ],
            "holds more than text",
        ),
        (
            [{"responses_create_params": {"input": "\u00e9"}, "agent_ref": {"name": "a"}}],
            "says nothing that the policy can read",
        ),
    ],
)
def test_a_row_that_can_t_be_played_is_named_before_anything_starts(tmp_path: Path, rows: list[Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        GymTask(rows_in(tmp_path / "rows.jsonl", *rows))


def test_too_few_rows_and_paths_that_workers_would_not_find_are_refused(tmp_path: Path) -> None:
    few = rows_in(tmp_path / "rows.jsonl", shape("agent_row"))
    with pytest.raises(ConfigurationError, match="data.num_prompts is 9, but .* has 1 rows"):
        GymTask(few.model_copy(update={"num_prompts": 9}))
    with pytest.raises(ConfigurationError, match="the absolute path of a file"):
        GymTask(DataConfig(task="gym:rows.jsonl"))
    with pytest.raises(ConfigurationError, match="can't be read"):
        GymTask(DataConfig(task="gym:/nowhere/rows.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'"\xe9"')
    with pytest.raises(ConfigurationError, match="can't be read: 'utf-8'"):
        GymTask(DataConfig(task=f"gym:{tmp_path}/latin.jsonl", num_prompts=1))
    with pytest.raises(ConfigurationError, match="set policy.warm_start_steps to 0"):
        GymTask(few).demonstration(0, 0.1)


def test_a_text_may_hold_any_separator_of_lines(tmp_path: Path) -> None:
    task = GymTask(rows_in(tmp_path / "rows.jsonl", json.dumps(asking("a\u2028b"), ensure_ascii=False)))
    assert json.loads(task.prompt(0)[1]) == asking("a\u2028b")
