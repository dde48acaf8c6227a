"""`python -m flows.ray_head ADDRESS_FILE TEMP_DIR`: a small Ray cluster on loopback that lives as long as this process.

Bounded object store, no dashboard, no usage statistics; its address is written to ADDRESS_FILE when it is ready.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import ray

NUM_CPUS = 2
OBJECT_STORE_BYTES = 200 << 20


def main() -> None:
    """Start the head, publish its address, wait for SIGTERM, end the cluster."""
    address_file, temp_dir = Path(sys.argv[1]), sys.argv[2]
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=temp_dir,
    )
    # After ray.init, which installs a handler of its own; a blocked signal would be inherited by Ray's processes.
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    partial = address_file.with_suffix(".partial")
    partial.write_text(ray.get_runtime_context().gcs_address)
    os.replace(partial, address_file)
    while not ended.wait(timeout=1.0):
        pass
    ray.shutdown()


if __name__ == "__main__":
    main()
