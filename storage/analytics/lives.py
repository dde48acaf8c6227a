"""The lives of runs: one row for each controller process that did something, and where each went on from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from storage.history import WORK
from storage.manifests import BrokenSlot, Manifest

Log = Sequence[Manifest | BrokenSlot]

# `life` counts from 0. `first_line`: events of the process before it do not count, but `run_started`. A life that is
# `restored` goes on at train step `step` from the model of `model_step`, and from what life `cut_life` did up to
# `cut_time`; one that is not starts afresh. `stopped_at`: the last event of all lives before, null for the first.
LIVES: Mapping[str, pl.DataType] = {
    **{"run": pl.String(), "life": pl.Int64(), "run_process": pl.String(), "first_line": pl.Int64()},
    **{"started_at": pl.Float64(), "ended_at": pl.Float64(), "stopped_at": pl.Float64(), "restored": pl.Boolean()},
    **{"sequence": pl.Int64(), "step": pl.Int64(), "model_step": pl.Int64()},
    **{"cut_time": pl.Float64(), "cut_life": pl.Int64()},
}


def lives_of(trace: pl.LazyFrame, logs: Mapping[str, Log]) -> pl.DataFrame:
    """The lives of every run of a trace, in order: as their claims lie in the manifest log of the run (`logs`, by run),
    or by time where a process is not in it.
    """
    spans = trace.group_by("run", "run_process").agg(
        pl.col("t").min().alias("started_at"),
        pl.col("t").max().alias("ended_at"),
        pl.col("event").is_in(list(WORK)).any().alias("worked"),
    )
    processes = spans.filter("worked").collect(engine="streaming").to_dicts()
    rare = trace.filter(pl.col("event").is_in(["run_started", "checkpoint_restored"]))
    columns = (
        "run",
        "run_process",
        "event",
        "t",
        "line",
        "sequence",
        "step",
        "model_step",
        "steps_to_replay",
        "cut_time",
    )
    openings = rare.select(columns).sort("line").collect(engine="streaming").to_dicts()
    rows: list[dict[str, Any]] = []
    for run in sorted({process["run"] for process in processes}):
        own = [process for process in processes if process["run"] == run]
        rows += _lives_of_run(run, own, [o for o in openings if o["run"] == run], logs.get(run, ()))
    return pl.DataFrame(rows, schema=dict(LIVES))


def _lives_of_run(
    run: str, processes: Sequence[Mapping[str, Any]], openings: Sequence[Mapping[str, Any]], log: Log
) -> Iterable[dict[str, Any]]:
    manifests = {slot.sequence: slot for slot in log if isinstance(slot, Manifest)}
    begun = [_begun(process, openings) for process in processes]
    first = {manifests[sequence].writer: sequence for sequence in sorted(manifests, reverse=True)}
    if all(life["run_process"] in first for life in begun):
        begun.sort(key=lambda life: first[life["run_process"]])
    else:
        begun.sort(key=lambda life: life["started_at"])
    stopped_at = None
    for number, life in enumerate(begun):
        life |= {"run": run, "life": number, "stopped_at": stopped_at, **_cut_of(life, number, begun, manifests)}
        stopped_at = life["ended_at"] if stopped_at is None else max(stopped_at, life["ended_at"])
    return [{name: life[name] for name in LIVES} for life in begun]


def _begun(process: Mapping[str, Any], openings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A restore that was tried again in one process counts once: the last one, with what follows it."""
    own = [opening for opening in openings if opening["run_process"] == process["run_process"]]
    restored = next((o for o in reversed(own) if o["event"] == "checkpoint_restored"), None)
    life = {**process, "restored": restored is not None, "first_line": 0}
    life |= {"sequence": None, "step": 0, "model_step": 0, "cut_time": None}
    if restored is not None:
        starts = [o["t"] for o in own if o["event"] == "run_started" and o["line"] < restored["line"]]
        step = restored["step"] or 0
        model_step = restored["model_step"]
        if model_step is None:
            model_step = step - (restored["steps_to_replay"] or 0)
        life |= {"started_at": starts[0] if starts else restored["t"], "first_line": restored["line"]}
        life |= {"sequence": restored["sequence"], "step": step, "model_step": model_step}
        life |= {"cut_time": restored["cut_time"]}
    return life


def _cut_of(
    life: Mapping[str, Any], number: int, begun: Sequence[Mapping[str, Any]], manifests: Mapping[int, Manifest]
) -> dict[str, Any]:
    """Up to when which life counts. The manifest knows better than the event, which older versions left short."""
    if not life["restored"]:
        return {"cut_time": begun[0]["started_at"] if number else None, "cut_life": None}
    manifest = manifests.get(life["sequence"])
    if manifest is None:
        return {"cut_time": life["cut_time"], "cut_life": number - 1 if number else None}
    writers = [n for n, other in enumerate(begun[:number]) if other["run_process"] == manifest.writer]
    earlier = [n for n, other in enumerate(begun[:number]) if other["started_at"] <= manifest.created_at]
    found = writers or earlier
    cut_time = manifest.cut_time if manifest.cut_time is not None else manifest.created_at
    return {"cut_time": cut_time, "cut_life": found[-1] if found else None}
