"""TransferQueue with such rows, in a process of its own: `python -m benchmarks.transfer_queue_checkpoint ROWS TOKENS`.

For each line "save FOLDER" or "load FOLDER" on standard input it takes or loads TransferQueue's own checkpoint and
answers with one JSON line: seconds, and processor seconds of this process and all of TransferQueue's.
"""

import json
import os
import sys
import time
from typing import Any

import ray
import torch

from benchmarks.measuring import cpu_seconds

# Rows that are put together are views of one tensor, and the checkpoint then holds the whole tensor for each of them:
# one row a put is slow to fill, but the smallest and quickest checkpoint.
ROWS_A_PUT = 1
# TransferQueue waits for ever for actors that an honest number of processors can't place.
LOGICAL_CPUS = 8


def put_rows(queue: Any, rows: int, tokens: int) -> None:
    """The long columns of the rows, and a key and a tag for each, as TransferQueue's key-value interface wants them."""
    from tensordict import TensorDict

    random = torch.Generator().manual_seed(5)
    for first in range(0, rows, ROWS_A_PUT):
        count = min(ROWS_A_PUT, rows - first)
        fields = {
            "token_ids": torch.randint(0, 150_000, (count, tokens), generator=random, dtype=torch.int32),
            "loss_mask": torch.arange(tokens).expand(count, tokens) >= tokens // 10,
            "logprobs": -torch.rand(count, tokens, generator=random),
        }
        queue.kv_batch_put(
            keys=[f"row-{number}" for number in range(first, first + count)],
            partition_id="train",
            fields=TensorDict(fields, batch_size=count),
            tags=[{"reward": 0.5, "version": 3} for _ in range(count)],
        )


def main() -> None:
    """Fill it, then serve."""
    import transfer_queue

    rows, tokens = int(sys.argv[1]), int(sys.argv[2])
    ray.init(address="local", num_cpus=LOGICAL_CPUS, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    put_rows(transfer_queue, rows, tokens)
    print(json.dumps({"ready": True}), flush=True)
    work = {"save": transfer_queue.save_checkpoint, "load": transfer_queue.load_checkpoint}
    for line in sys.stdin:
        name, folder = line.split()
        cpu, started = cpu_seconds(os.getpid()), time.perf_counter()
        work[name](folder)
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "cpu_s": cpu_seconds(os.getpid()) - cpu}), flush=True)
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
