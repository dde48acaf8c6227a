"""Tokens per second through the generator actor against the bare engine: `python -m benchmarks.generation_throughput`.

Both run on the same engine with the same prompts, groups of 8 and 4 groups at once (32 concurrent requests),
interleaved. Every answer has its full length, so that both ways sample the same number of tokens in each round. "Bare"
is vLLM's AsyncLLM driven inside the actor with vLLM's own sampler: no Ray, no counter sampler, no rows, no scores. The
requirement, a ratio of at least 0.95, is for answers of 128 tokens. Answers of 9 tokens show the cost of a group's way
to the engine and back (some 5 ms against 40 ms of sampling); keeping more groups in flight hides it. Ratios mean
something on an idle machine only: the load average is printed.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from gpu_workers.controller.ports import GroupOrder, SiblingOrder, SiblingResult
from gpu_workers.environments.tasks import build_task
from gpu_workers.generation.generator_actor import GENERATOR_ACTOR_OPTIONS, GeneratorActor
from gpu_workers.generation.generator_client import GeneratorClient
from gpu_workers.generation.model_calls import ModelCalls
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.generation.sampling import SeededSampling, sampling_settings
from gpu_workers.generation.sibling_runner import SiblingRunner
from gpu_workers.models.tiny import ensure_model
from storage.records import Prompt, PromptRef, RecoveryLevel
from storage.run_config import RunConfig

_SIBLINGS = 8
_CONCURRENT_GROUPS = 4
_LIMIT = 0.95


class BenchmarkedActor(GeneratorActor):
    """The generator with a second way to its engine. No token ends an answer: both ways have the same work to do."""

    def __init__(self, config: RunConfig, model_dir: Path, index: int) -> None:
        super().__init__(config, model_dir, index)
        chosen: Any = type(self._engine.sampling)
        self._engine = replace(self._engine, sampling=chosen(sampling_settings(config, ())))
        self._siblings = SiblingRunner(config, ModelCalls(config, self._engine, self._name), self._task, self._name)

    async def bare(self, orders: list[GroupOrder]) -> int:
        """Run the groups on the engine alone; tokens sampled."""
        sampling = SeededSampling(sampling_settings(self._config, ()))

        async def call(order: GroupOrder, index: int) -> int:
            params = sampling.params(0, prompt_length=len(order.prompt.token_ids))
            params.seed = None
            tokens = {"type": "token", "prompt_token_ids": list(order.prompt.token_ids)}
            outputs = [o async for o in self._engine.llm.generate(tokens, params, f"{order.group_id}-{index}")]
            return len(outputs[-1].outputs[0].token_ids)

        async def group(order: GroupOrder) -> int:
            return sum(await asyncio.gather(*(call(order, s.generation_index) for s in order.siblings)))

        return await limited(orders, group)


async def limited(orders: list[GroupOrder], group: Callable[[GroupOrder], Awaitable[int]]) -> int:
    """Run all groups, `_CONCURRENT_GROUPS` at once; the sum of their tokens."""
    waiting = iter(orders)

    async def lane() -> int:
        return sum([await group(order) for order in waiting])

    return sum(await asyncio.gather(*(lane() for _ in range(_CONCURRENT_GROUPS))))


async def through_actor(client: GeneratorClient, orders: list[GroupOrder]) -> int:
    """Run the groups as the controller does; tokens sampled."""

    async def group(order: GroupOrder) -> int:
        tokens = 0
        async for result in client.generate(order):
            assert isinstance(result, SiblingResult), result
            assert result.calls is not None, result
            tokens += len(result.calls.column("token_ids")[0])
        return tokens

    return await limited(orders, group)


async def measure(handle: Any, orders: list[GroupOrder], rounds: int) -> tuple[list[float], list[float]]:
    """Tokens per second of the bare engine and of the actor, one of each per round after one to warm up."""
    client = GeneratorClient(handle)
    bare: list[float] = []
    actor: list[float] = []
    ways: list[tuple[list[float], Callable[[], Awaitable[int]]]] = [
        (bare, lambda: handle.bare.remote(orders)),
        (actor, lambda: through_actor(client, orders)),
    ]
    for number in range(rounds + 1):
        for rates, way in ways if number % 2 else reversed(ways):
            started = time.perf_counter()
            tokens = await way()
            if number:
                rates.append(tokens / (time.perf_counter() - started))
    return bare, actor


def group_orders(config: RunConfig, groups: int) -> list[GroupOrder]:
    """The first groups of the dataset."""
    task, keeps = build_task(config.data), config.rollout_recovery.uses(RecoveryLevel.PREFIX)
    orders = []
    for ordinal in range(groups):
        token_ids, task_json = task.prompt(ordinal)
        prompt = Prompt(PromptRef(ordinal, 0, ""), token_ids, task_json)
        siblings = tuple(SiblingOrder(index, 0) for index in range(_SIBLINGS))
        orders.append(GroupOrder(prompt.ref.group_id, prompt, siblings, keeps_running=keeps))
    return orders


def main() -> None:
    """Measure short and long answers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--groups", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
        print(
            f"{'answers':<24} {'bare tokens/s':>14} {'actor tokens/s':>15} {'ratio':>7}   load {os.getloadavg()[0]:.1f}"
        )
        for name, steps, length in (("long (128 tokens)", 0, 128), ("short (9 tokens)", 200, 9)):
            config = RunConfig(
                name="throughput",
                policy={"warm_start_steps": steps},
                generation={"max_new_tokens": length, "max_model_len": length + 64},
            )
            actor: Any = ray.remote(BenchmarkedActor)
            handle = actor.options(
                **GENERATOR_ACTOR_OPTIONS, num_cpus=0, runtime_env={"env_vars": generator_env(config)}
            ).remote(config, str(ensure_model(config, Path(folder))), 0)
            orders = group_orders(config, arguments.groups)
            bare, through = asyncio.run(measure(handle, orders, arguments.rounds))
            ratio = statistics.median(a / b for a, b in zip(through, bare, strict=True))
            print(
                f"{name:<24} {statistics.median(bare):>14.0f} {statistics.median(through):>15.0f} {ratio:>7.3f}  "
                f"{'' if length < 128 else 'ok' if ratio >= _LIMIT else 'TOO SLOW'}",
                flush=True,
            )
            ray.kill(handle)
        ray.shutdown()


if __name__ == "__main__":
    main()
