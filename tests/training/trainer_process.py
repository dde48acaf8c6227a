"""Runs a trainer rank in a process of its own: `python trainer_process.py FOLDER`, driven by the tests beside it.

Reads `order.json` and `<step>.arrow` in the folder, writes `answer.json`: metrics, hashes and file entries.
"""

import json
import sys
from pathlib import Path

import pyarrow as pa

from gpu_workers.training.trainer_actor import TrainerActor
from storage.run_config import RunConfig


def main(folder: Path) -> None:
    """Restore if asked to, train the steps, save if asked to."""
    order = json.loads((folder / "order.json").read_text())
    trainer = TrainerActor(
        RunConfig.model_validate(order["config"]),
        Path(order["model_dir"]),
        order["rank"],
        order["world_size"],
        folder / "weights",
        "process",
        rendezvous=order["rendezvous"],
    )
    if order["restore"]:
        trainer.restore(order["restore"])
    results = []
    for step in order["steps"]:
        trainer.begin_step(step)
        file = pa.ipc.open_file(str(folder / f"{step}.arrow"))
        trainer.train_microbatch([file.get_batch(index) for index in range(file.num_record_batches)])
        results.append(trainer.finish_step(step))
    answer = {
        "hashes": [result.weights_sha256 for result in results],
        "metrics": [dict(result.metrics) for result in results],
        "files": trainer.save(order["save"]) if order["save"] else [],
    }
    (folder / "answer.json").write_text(json.dumps(answer))


main(Path(sys.argv[1]))
