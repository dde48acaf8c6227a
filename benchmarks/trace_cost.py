"""What the trace costs a run: `python -m benchmarks.trace_cost`.

The events of tiny train steps (4 groups of 4 siblings) are recorded at the pace of a live tiny run: in bursts, as a
controller does (a batch is reserved, admitted and dispatched at once; every sibling seals by itself; a group is sealed
and published at once), or, the dearest case, evenly spread over the step. Rounds with a real trace on a local disk and
rounds with none alternate; the loop that paces them is the same. Processor time of the whole process (recording and
the writer's thread) with the trace, less that without, is its cost. The requirement: under 1 % of a step.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.measuring import show, spread
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.trace import NoTrace, TraceWriter

GROUPS, SIBLINGS = 4, 4
# 7.2 steps per second: `python -m benchmarks.snapshot_interval`.
STEP_S = 1 / 7.2
LIMIT = 0.01
DIGEST = "0" * 64


def events_of_step(step: int) -> list[tuple[str, Mapping[str, Any]]]:
    """What a controller records in one step, with fields of the usual size."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    groups = [f"e0-p{step * GROUPS + number}" for number in range(GROUPS)]
    for group in groups:
        prompt = {"prompt_id": step, "epoch": 0}
        siblings = [
            {"rollout_id": f"{group}_g{index}", "attempt": 0, **prompt, "generation_index": index}
            for index in range(SIBLINGS)
        ]
        found += [("group_reserved", {"group_id": group, **prompt, "batch": step})]
        found += [("group_admitted", {"group_id": group, "target_step": step, "start_version": step})]
        found += [("attempt_dispatched", sibling) for sibling in siblings]
        sealed = {"reward": 0.5, "num_tokens": 12, "digest": DIGEST, "generation_s": 0.1, "environment_s": 0.001}
        found += [("attempt_sealed", {**sibling, **sealed}) for sibling in siblings]
        published = {"version_tokens": [[step, 48]], "num_tokens": 48, "rewards": [0.5] * SIBLINGS}
        found += [("group_sealed", {"group_id": group})]
        found += [("group_published", {"group_id": group, **prompt, **published, "rollout_sha256": DIGEST})]
    report = {"step": step, "version": step, "group_ids": groups, "prompt_ids": [step] * GROUPS, "rewards_mean": 0.5}
    metrics = {f"metric_{number}": 0.5 for number in range(25)}
    found += [("train_step", {**report, "metrics": metrics, "weights_sha256": DIGEST, "seconds": 0.1})]
    return [*found, ("weight_sync", {"version": step, "seconds": 0.01, "timings": {"load_s": 0.01}})]


_AT_ONCE = ("group_reserved", "group_admitted", "attempt_dispatched")


def bursts_of(events: list[tuple[str, Mapping[str, Any]]]) -> list[list[tuple[str, Mapping[str, Any]]]]:
    """Events as they come together in a controller."""
    begun = [event for event in events if event[0] in _AT_ONCE]
    bursts = [[event] for event in events if event[0] not in (*_AT_ONCE, "group_sealed", "group_published")]
    finished = [event for event in events if event[0] in ("group_sealed", "group_published")]
    return [begun, *bursts, *(finished[first : first + 2] for first in range(0, len(finished), 2))]


def processor_s(trace: NoTrace | TraceWriter, steps: int, *, spread_out: bool) -> tuple[float, float]:
    """Processor seconds of the process, and of the recording thread inside `record`, for so many paced steps."""
    recording, began, due = 0.0, time.process_time(), time.perf_counter()
    for step in range(steps):
        events = events_of_step(step)
        bursts = [[event] for event in events] if spread_out else bursts_of(events)
        for burst in bursts:
            due += STEP_S / len(bursts)
            time.sleep(max(0.0, due - time.perf_counter()))
            asked = time.thread_time()
            for name, fields in burst:
                trace.record(name, **fields)
            recording += time.thread_time() - asked
    trace.close()
    return time.process_time() - began, recording


def measure(*, rounds: int, steps: int, spread_out: bool) -> tuple[list[float], list[float]]:
    """Processor seconds per step that the trace costs, all and in `record`, one for each round."""
    costs, recorded = [], []
    with tempfile.TemporaryDirectory(prefix="midflight-bench-") as folder:
        for number in range(rounds):
            trace = TraceWriter(open_store(folder), RunLayout("run"), process=f"p{number}", run_process="p")
            with_trace, recording = processor_s(trace, steps, spread_out=spread_out)
            without, nothing = processor_s(NoTrace(), steps, spread_out=spread_out)
            costs.append((with_trace - without) / steps)
            recorded.append((recording - nothing) / steps)
    return costs, recorded


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    chosen = parser.parse_args()
    kinds = [measure(rounds=chosen.rounds, steps=chosen.steps, spread_out=spread_out) for spread_out in (False, True)]
    per_step = len(events_of_step(0))
    rows = [
        ("CPU µs per event: recording", *(spread([1e6 * s / per_step for s in recorded]) for _, recorded in kinds)),
        ("CPU µs per event: all", *(spread([1e6 * s / per_step for s in costs]) for costs, _ in kinds)),
        ("CPU ms per step", *(spread([1e3 * s for s in costs], 3) for costs, _ in kinds)),
        (f"% of a step of {1e3 * STEP_S:.0f} ms", *(spread([100 * s / STEP_S for s in costs]) for costs, _ in kinds)),
    ]
    verdict = "kept" if statistics.median(kinds[0][0]) / STEP_S < LIMIT else "NOT KEPT"
    note = f"medians (range); under {100 * LIMIT:.0f} % of a step: {verdict}"
    show(f"The trace, {per_step} events per step", ("", "in bursts", "evenly spread"), rows, note=note)


if __name__ == "__main__":
    main()
