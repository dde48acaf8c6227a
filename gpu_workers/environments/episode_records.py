"""Records of episodes: how one grows by a turn, what is read back from it, and which ones can't be continued."""

import json
import re
from dataclasses import replace

from gpu_workers.environments.interface import Environment, Json, Mode, Step
from gpu_workers.environments.ports import Boundary, CallRef, EpisodeId, EpisodeTask
from gpu_workers.environments.states import canonical_state, digest_of
from storage.errors import DataFailure, EnvironmentRefusal
from storage.records import EpisodeRecord

_ROLLOUT_ID = re.compile(r".+_g(0|[1-9][0-9]*)", re.ASCII)


def generation_index_of(rollout_id: str) -> int:
    """The index at the end of `<group_id>_g<index>`. Refused: `rollout_id_required`."""
    match = _ROLLOUT_ID.fullmatch(rollout_id)
    if match is None:
        raise EnvironmentRefusal(
            "rollout_id_required", f"{rollout_id!r} is no rollout id; give '<group_id>_g<index>', such as 'e0-p7_g1'"
        )
    return int(match[1])


def task_of(task_json: str, episode: EpisodeId) -> Json:
    """The task an environment is reset with; DataFailure when it isn't a JSON object."""
    try:
        task: object = json.loads(task_json)
    except ValueError as error:
        raise DataFailure(f"the task of episode {episode} is not JSON: {task_json[:100]!r}") from error
    if not isinstance(task, dict):
        raise DataFailure(f"the task of episode {episode} is {task_json[:100]!r}; an environment's task is an object")
    return task


def first_record(
    instance: str, episode: EpisodeId, task: EpisodeTask, environment: Environment, step: Step
) -> EpisodeRecord:
    """The record after the reset."""
    state_json = _saved(step, environment, f"environment '{environment.name}', episode {episode}, reset: state")
    opening = [] if step.done else [_message("environment", step.observation)]
    return EpisodeRecord(
        rollout_id=episode.rollout_id,
        attempt=episode.attempt,
        instance=instance,
        environment=task.environment,
        version=environment.version,
        mode=environment.mode.value,
        seed=task.seed,
        task_json=task.task_json,
        task_digest=digest_of(task.task_json),
        turn=0,
        state_json=state_json,
        state_sha256=digest_of(state_json),
        messages_json=f"[{','.join(opening)}]",
        rewards=(),
        calls=(),
        weight_versions=(),
        deadline_left_s=task.deadline_s,
        parked_s=0.0,
    )


def next_record(
    record: EpisodeRecord, environment: Environment, *, action: str, call: CallRef, step: Step
) -> EpisodeRecord:
    """The record after one more turn. The observation after the last turn is nobody's, so it is left out."""
    where = f"environment '{environment.name}', episode {record.row_key}, turn {record.turn}: state"
    state_json = _saved(step, environment, where)
    said = [_message("policy", action)]
    if not step.done and record.turn + 1 < environment.max_turns:
        said.append(_message("environment", step.observation))
    before = record.messages_json[1:-1]
    return replace(
        record,
        turn=record.turn + 1,
        state_json=state_json,
        state_sha256=digest_of(state_json),
        messages_json=f"[{','.join([before, *said] if before else said)}]",
        rewards=(*record.rewards, float(step.reward)),
        calls=(*record.calls, call.key),
        weight_versions=(*record.weight_versions, call.weight_version),
    )


def boundary_of(record: EpisodeRecord) -> Boundary:
    """What the policy reads next: the newest message, if it is the environment's; otherwise the episode is done."""
    messages = json.loads(record.messages_json)
    going_on = bool(messages) and messages[-1]["role"] == "environment"
    return Boundary(record.turn, messages[-1]["text"] if going_on else "", not going_on, record)


def last_action(record: EpisodeRecord) -> str | None:
    """What the policy said in the newest turn; None before the first."""
    texts = [message["text"] for message in json.loads(record.messages_json) if message["role"] == "policy"]
    return texts[-1] if texts else None


def check_restorable(record: EpisodeRecord, environment: Environment) -> None:
    """Refuse (`invalid_checkpoint_state`) a record that this environment can't continue, or that was changed."""
    generation_index_of(record.rollout_id)
    here = (environment.version, environment.mode.value)
    if (record.version, record.mode) != here or environment.mode is Mode.RESTART_ONLY:
        raise invalid(record, f"was saved by (version, mode) {(record.version, record.mode)}, this instance has {here}")
    if digest_of(record.state_json) != record.state_sha256:
        raise invalid(record, f"has a state that does not fit its sha256 {record.state_sha256}")
    if digest_of(record.task_json) != record.task_digest:
        raise invalid(record, f"has a task that does not fit its digest {record.task_digest}")
    if not len(record.rewards) == len(record.calls) == len(record.weight_versions) == record.turn:
        raise invalid(record, f"counts {record.turn} turns, but not as many rewards, calls and weight versions")
    if not (_is_state(record.state_json) and _are_messages(record.messages_json, record.turn)):
        raise invalid(record, "has a state or messages that are not of the form of a record")


def invalid(record: EpisodeRecord, what: str) -> EnvironmentRefusal:
    """The refusal of one record."""
    return EnvironmentRefusal(
        "invalid_checkpoint_state", f"episode {record.row_key} of '{record.environment}' {what}; run the rollout again"
    )


def _is_state(state_json: str) -> bool:
    try:
        return isinstance(json.loads(state_json), dict)
    except ValueError:
        return False


def _are_messages(messages_json: str, turns: int) -> bool:
    try:
        messages = json.loads(messages_json)
    except ValueError:
        return False
    if not isinstance(messages, list):
        return False
    whole = all(
        isinstance(message, dict)
        and message.get("role") in ("environment", "policy")
        and isinstance(message.get("text"), str)
        for message in messages
    )
    return whole and sum(message["role"] == "policy" for message in messages) == turns


def _message(role: str, text: str) -> str:
    return json.dumps({"role": role, "text": text})


def _saved(step: Step, environment: Environment, where: str) -> str:
    """States that can't come back are not looked at."""
    return "" if environment.mode is Mode.RESTART_ONLY else canonical_state(step.state, where=where)
