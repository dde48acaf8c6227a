"""Seconds from asking Ray for a generator to its first token: `python -m benchmarks.engine_start`.

The requirement is under 20 s on two cores. `--cold` also empties vLLM's cache of model descriptions, as on a new
machine. Ray itself is started before the clock.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from gpu_workers.controller.ports import GroupOrder, SiblingOrder
from gpu_workers.environments.tasks import build_task
from gpu_workers.generation.generator_actor import GENERATOR_ACTOR_OPTIONS, GeneratorActor
from gpu_workers.generation.generator_client import GeneratorClient
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.models.tiny import ensure_model
from storage.records import Prompt, PromptRef
from storage.run_config import RunConfig

_LIMIT_S = 20.0


async def first_token(config: RunConfig, model_dir: Path, cache: Path | None) -> tuple[float, float]:
    """Seconds until the actor is ready and until it returned one token; the actor is ended afterwards."""
    environment = generator_env(config) | ({"VLLM_CACHE_ROOT": str(cache)} if cache else {})
    started = time.perf_counter()
    actor: Any = ray.remote(GeneratorActor)
    handle = actor.options(**GENERATOR_ACTOR_OPTIONS, num_cpus=0, runtime_env={"env_vars": environment}).remote(
        config, str(model_dir), 0
    )
    await handle.ready.remote()
    ready = time.perf_counter()
    token_ids, task_json = build_task(config.data).prompt(0)
    order = GroupOrder("e0-p0", Prompt(PromptRef(0, 0, ""), token_ids, task_json), (SiblingOrder(0, 0),))
    async for _ in GeneratorClient(handle).generate(order):
        pass
    token = time.perf_counter()
    ray.kill(handle)
    return ready - started, token - started


def main() -> None:
    """Measure a few starts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="start each engine with an empty vLLM cache")
    arguments = parser.parse_args()
    config = RunConfig(name="engine-start", policy={"warm_start_steps": 0}, generation={"max_new_tokens": 1})
    with tempfile.TemporaryDirectory() as folder:
        model_dir = ensure_model(config, Path(folder))
        ray.init(address="local", include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
        print(f"{'start':>6} {'ready s':>9} {'first token s':>14}   load {os.getloadavg()[0]:.1f}")
        for number in range(arguments.rounds):
            cache = Path(folder) / f"cache-{number}" if arguments.cold else None
            ready, token = asyncio.run(first_token(config, model_dir, cache))
            print(f"{number + 1:>6} {ready:>9.1f} {token:>14.1f}  {'ok' if token < _LIMIT_S else 'TOO SLOW'}")
        ray.shutdown()


if __name__ == "__main__":
    main()
