"""The vocabulary of the trace: every event, its fields, and the one column that each field is in a frame.

A field means the same, with the same type, in every event that has it. What this version does not know stays readable:
unknown events are rows like any other, and unknown fields, values of another type and explicit nulls are in `extra`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

_TEXT, _WHOLE, _REAL, _FLAG = pl.String(), pl.Int64(), pl.Float64(), pl.Boolean()

# Objects with keys of their own, such as `metrics`: JSON text in a frame.
OBJECTS = frozenset({"faults", "metrics", "pids", "timings"})

# What every event has: Unix seconds, the process that recorded it, its name.
HEAD: Mapping[str, pl.DataType] = {"t": _REAL, "run_process": _TEXT, "event": _TEXT}

FIELDS: Mapping[str, pl.DataType] = {
    **dict.fromkeys(
        (
            *(
                "group_id",
                "rollout_id",
                "reason",
                "message",
                "kind",
                "outcome",
                "trigger",
                "place",
                "instance",
                "level",
            ),
            *("instead_of", "repaid_by", "incarnation", "config_fingerprint"),
            *("digest", "rollout_sha256", "rollouts_sha256", "weights_sha256", "fields"),
            *sorted(OBJECTS),
        ),
        _TEXT,
    ),
    **dict.fromkeys(
        (
            *("prompt_id", "epoch", "generation_index", "attempt", "environment_attempt", "batch", "turns"),
            *("target_step", "start_version", "version", "step", "model_step", "from_step", "to_step"),
            *("sequence", "anchor_sequence", "number", "index", "num_tokens", "events"),
            *("groups", "rows", "recorded_steps", "rolled_back_train_group_count", "sealed_siblings"),
            *("running_attempts", "episodes", "finished_turns", "steps_to_replay", "groups_buffered"),
            *("groups_unfinished", "siblings_reused", "siblings_resumed", "siblings_rerun", "turns_kept"),
            *("tokens_kept", "restarts_in_a_row", "train_steps", "running_groups", "ledger_groups", "buffered_groups"),
            *("tokens", "partial_calls", "partial_tokens", "unreadable_calls", "calls_continued", "tokens_continued"),
        ),
        _WHOLE,
    ),
    **dict.fromkeys(
        (
            *("seconds", "waited_s", "generation_s", "environment_s", "cut_time", "cut_ms", "barrier_wait_ms"),
            *("write_s", "peek_ms", "reward", "rewards_mean", "batch_age"),
        ),
        _REAL,
    ),
    **dict.fromkeys(("replayed", "committed", "ends", "step_asked_for"), _FLAG),
    "group_ids": pl.List(_TEXT),
    "prompt_ids": pl.List(_WHOLE),
    "siblings": pl.List(_WHOLE),
    "chunks": pl.List(_WHOLE),
    "rewards": pl.List(_REAL),
    "version_tokens": pl.List(pl.List(_WHOLE)),
}

# The columns of a frame, in their order. `line` counts the events of a process from 0; `extra` is JSON text, null where
# nothing is left.
COLUMNS: Mapping[str, pl.DataType] = {**HEAD, "line": _WHOLE, **FIELDS, "extra": _TEXT}


@dataclass(frozen=True, slots=True)
class EventType:
    """What an event says, and its fields. `optional` ones are left out by some of its recorders, or by older ones."""

    meaning: str
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()


_SIBLING = ("rollout_id", "attempt", "prompt_id", "epoch", "generation_index")
_PLACE = ("target_step", "start_version")

EVENTS: Mapping[str, EventType] = {
    "run_started": EventType(
        "A controller process has claimed the run.", (), ("incarnation", "config_fingerprint", "pids")
    ),
    "run_ended": EventType("It has ended in order, and says why.", ("reason",)),
    "fenced": EventType("Another controller has claimed the run.", ("reason",)),
    "trace_lost": EventType("So many events could not be written for too long and were dropped.", ("events",)),
    "faults_planned": EventType(
        "This process is to meet faults on purpose, by their number (docs/chaos.md).", ("faults",)
    ),
    "group_reserved": EventType(
        "A prompt was taken from the source and promised in the ledger; `level`: what a restart reuses of its group.",
        ("group_id", "prompt_id", "epoch", "batch"),
        ("level",),
    ),
    "group_admitted": EventType("The sampler let the group's batch be dispatched.", ("group_id", *_PLACE)),
    "attempt_dispatched": EventType("An attempt of a sibling was sent to a generator.", _SIBLING),
    "attempt_resumed": EventType(
        "An attempt was sent to go on from `turns` finished turns, and `tokens` of the model call after them.",
        (*_SIBLING, "turns", "environment_attempt"),
        ("tokens",),
    ),
    "attempt_interrupted": EventType(
        "The generator of a running attempt failed; it goes on with the finished turns and `tokens` that are known of "
        "it.",
        ("rollout_id", "attempt", "reason", "tokens"),
        ("message", "turns"),
    ),
    "prefix_discarded": EventType(
        "A generator could not continue these tokens of a model call, and samples the call anew.",
        ("rollout_id", "attempt", "tokens", "reason"),
    ),
    "call_unreadable": EventType(
        "The tokens of a running model call can't be read; it is run again from its last turn where it is interrupted.",
        ("rollout_id", "reason"),
    ),
    "peek_failed": EventType(
        "A generator (`index`), or all of them together, did not tell the tokens of their running calls in time.",
        ("reason",),
        ("index",),
    ),
    "attempt_sealed": EventType(
        "A sibling has its result. `generation_s` and `environment_s`: seconds of this attempt in model calls and in "
        "environment turns (scoring included), in this process.",
        (*_SIBLING, "reward", "num_tokens", "digest"),
        ("generation_s", "environment_s"),
    ),
    "attempt_refused": EventType(
        "The environment was closed for a checkpoint; the same attempt is sent again.",
        ("rollout_id", "attempt", "message"),
    ),
    "attempt_abandoned": EventType(
        "An attempt is not the current one any more: `restart`, `stale`, `infrastructure` or `data`.",
        ("rollout_id", "attempt", "reason"),
        ("message",),
    ),
    "rollout_masked": EventType("A sibling can't be joined and is not trained.", ("rollout_id", "reason")),
    "group_sealed": EventType("Every sibling of the group has its result.", ("group_id",)),
    "group_published": EventType(
        "The group is in the replay buffer. `version_tokens`: pairs of weight version and tokens sampled under it.",
        (*("group_id", "prompt_id", "epoch"), *_PLACE, "version_tokens", "num_tokens", "rewards", "rollout_sha256"),
    ),
    "group_discarded": EventType(
        "The group was given up: `evicted` from the buffer or `stale` while it ran.",
        ("group_id", "reason", *_PLACE, "version"),
    ),
    "prompt_dropped": EventType(
        "A prompt's budget is spent; `place` says what became of its place: `lost`, `replaced` or `promoted`.",
        ("group_id", "reason", "target_step", "place"),
    ),
    "group_promoted": EventType(
        "A ready group took the place of a dropped one.",
        ("group_id", "from_step", "to_step", "instead_of", "repaid_by"),
    ),
    "redispatched": EventType("A restored group is launched again, for these siblings.", ("group_id", "siblings")),
    "finalization_unknown": EventType(
        "Whether the group's rows are there is not known; the run stops.", ("group_id", "reason")
    ),
    "train_step": EventType(
        "A train step has committed. `version`: the trainer's after it; `seconds` of the whole step, `waited_s` of "
        "them for groups; `replayed`: trained again from its recorded batch.",
        (
            *("step", "version", "prompt_ids", "group_ids", "chunks", "rewards_mean", "batch_age", "metrics"),
            *("weights_sha256", "rollouts_sha256", "seconds", "waited_s", "replayed"),
        ),
    ),
    "weight_sync": EventType("The generators hold these weights.", ("version", "seconds", "timings")),
    "snapshot_attempt": EventType(
        "A rollout snapshot was `completed`, `skipped` or `failed`.",
        ("number", "outcome", "reason", "sequence", "step"),
        (
            *("cut_ms", "barrier_wait_ms", "write_s", "groups", "rows", "recorded_steps"),
            *("rolled_back_train_group_count", "sealed_siblings", "running_attempts", "episodes", "finished_turns"),
            *("partial_calls", "partial_tokens", "unreadable_calls", "peek_ms"),
        ),
    ),
    "checkpoint_published": EventType(
        "A trainer checkpoint is durable.", ("sequence", "kind", "step", "trigger", "cut_time")
    ),
    "checkpoint_failed": EventType("A trainer checkpoint was not published.", ("step", "trigger", "reason")),
    "checkpoint_restored": EventType(
        "The process goes on from this bundle.",
        (
            *("sequence", "anchor_sequence", "kind", "step", "model_step", "steps_to_replay", "cut_time"),
            *("groups_buffered", "groups_unfinished", "siblings_reused", "siblings_rerun", "tokens_kept"),
        ),
        ("siblings_resumed", "turns_kept", "calls_continued", "tokens_continued"),
    ),
    "environment_parked": EventType(
        "The environments were closed for a snapshot for so long.", ("seconds", "committed")
    ),
    "environment_resume_failed": EventType(
        "An environment did not open again when told to; its lease opens it.", ("instance", "reason", "committed")
    ),
    "environment_restart_only": EventType("An environment server, or a Gym's agent, saves no episodes.", ("instance",)),
    "environment_unreachable": EventType(
        "An environment's process is gone; a snapshot was taken without its episodes.", ("instance", "reason")
    ),
    "generator_died": EventType("A generator's process ended with `groups` in flight.", ("index", "reason", "groups")),
    "generator_restarted": EventType("It runs again.", ("index", "version", "restarts_in_a_row", "pids", "seconds")),
    "generator_lost": EventType("It is given up.", ("index", "reason")),
    "run_stalled": EventType(
        "Nothing got any further for so long.",
        (*("seconds", "ends", "train_steps", "step_asked_for"), "running_groups", "ledger_groups", "buffered_groups"),
    ),
}


def misfits(event: Mapping[str, object]) -> list[str]:
    """What about an event is not as documented here: its name, fields it lacks, fields that nobody knows."""
    known = EVENTS.get(str(event["event"]))
    if known is None:
        return [f"event {event['event']!r} is not known"]
    given = event.keys() - HEAD.keys()
    lacking = sorted(set(known.fields) - given)
    unknown = sorted(given - {*known.fields, *known.optional})
    return [
        f"{event['event']}: {what} {', '.join(names)}"
        for what, names in (("lacks", lacking), ("has unknown", unknown))
        if names
    ]
