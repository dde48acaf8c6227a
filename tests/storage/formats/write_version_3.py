"""Wrote `version-3/`: a small store whose state tables have version 3, which readers must keep reading. It is never
written again. Programs that wrote earlier versions are in the history.

Run from the root of the repository, with a folder that does not exist yet:

    PYTHONPATH=. python tests/storage/formats/write_version_3.py tests/storage/formats/version-3
"""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from storage.filesystem import open_store
from storage.records import DroppedPrompt, Progress, SourcePosition, TrainedGroup
from storage.run_record import create_run_record


def write(folder: Path) -> None:
    """A trainer checkpoint of step 1, and a snapshot at step 2 with something in every table."""
    builders = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))
    make = builders["Make"]()
    run = builders["Run"](open_store(str(folder)), make).claim()
    create_run_record(run.store, run.layout, run.config)
    checkpoint = run.checkpoint(1, buffered=(4, 5))
    trained, trained_rows = make.buffered(4)
    progress = Progress(
        train_steps=2,
        trainer_version=2,
        source=SourcePosition(0, 13),
        sampler_cursor=3,
        stamps=True,
        next_batch=3,
        next_order=13,
        shortfall={2: 1},
    )
    state, rows = make.state(
        buffered=(5, 6),
        ledger=(7, 8),
        progress=progress,
        spares=(make.prompt(9),),
        dropped=(DroppedPrompt(make.prompt(10), "data failure", None),),
        trained=(TrainedGroup(2, 0, trained),),
    )
    group, episodes, episode_rows = make.episode_group(11)
    running, partial, chunks = make.prefix_group(12)
    state = replace(state, ledger=(*state.ledger, group, running), episodes=episodes, partial_calls=partial)
    captured = run.bundle(state, rows | trained_rows | episode_rows | chunks, anchor=checkpoint)
    run.writer.write(replace(captured, cut_time=checkpoint.created_at + 1))
    lines = [json.dumps(event) for event in _events(checkpoint.created_at)]
    run.store.write(run.layout.trace("controller"), ("\n".join(lines) + "\n").encode())


def _events(start: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"event": "run_started", "incarnation": "first", "config_fingerprint": "f"}]
    for step, group in ((1, "e0-p3"), (2, "e0-p4")):
        events.append(
            {
                "event": "group_published",
                "group_id": group,
                "prompt_id": int(group[-1]),
                "epoch": 0,
                "rewards": [0.1, 1.1],
                "version_tokens": [[step - 1, 4]],
            }
        )
        events.append(
            {
                "event": "train_step",
                "step": step,
                "version": step,
                "group_ids": [group],
                "rewards_mean": 0.6,
                "seconds": 1,
            }
        )
    return [{"t": start + number / 10, "run_process": "first", **event} for number, event in enumerate(events)]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
