"""Windows of time of a live run, with snapshots at intervals and without: part of `benchmarks.snapshot_interval`.

`python -m benchmarks.snapshot_windows RUN PAIRS SECONDS INTERVAL_S PID ...`, in the environment of the run's services
(Ray and Prefect read it when they are imported). Prints one JSON line per window.
"""

import asyncio
import json
import sys
import time

from prefect import flow

from benchmarks.measuring import cpu_seconds
from flows.home import Home
from tasks.ray_runtime import RayRuntime
from tasks.snapshots import attempt_number, attempt_snapshot


@flow(name="snapshots-of-the-benchmark", persist_result=False)
async def watch(run: str, pairs: int, seconds: float, interval_s: float, pids: list[int]) -> None:
    """Windows in the order with-without, without-with, ..., so that a drift of the machine cancels out."""
    runtime = RayRuntime(run, cache=Home.current().cache)
    status = await runtime.status()
    assert status is not None

    async def snapshots(start: float) -> None:
        for number in range(round(seconds / interval_s)):
            await asyncio.sleep(max(0.0, start + number * interval_s - time.time()))
            await attempt_snapshot(runtime, attempt_number(), False, status.incarnation)

    for number in range(2 * pairs):
        has_snapshots = number % 4 in (0, 3)
        start, cpu = time.time(), sum(map(cpu_seconds, pids))
        if has_snapshots:
            await snapshots(start)
        await asyncio.sleep(max(0.0, start + seconds - time.time()))
        cpu = sum(map(cpu_seconds, pids)) - cpu
        window = {"has_snapshots": has_snapshots, "start": start, "end": time.time(), "cpu_s": cpu}
        print(json.dumps(window), flush=True)


def main() -> None:
    """Watch them all."""
    run, pairs, seconds, interval_s, *pids = sys.argv[1:]
    asyncio.run(watch(run, int(pairs), float(seconds), float(interval_s), [int(pid) for pid in pids]))


if __name__ == "__main__":
    main()
