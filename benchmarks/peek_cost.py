"""What a look at the running calls of a generator costs: `python -m benchmarks.peek_cost`.

A real engine on the CPU with the tiny model, whose answers have no end, so that as many calls run as are wanted. A look
asks either for the tokens since the last one, or for all of them. Counted is processor time of the thread that holds
the generator's event loop, and the way to the generator and back. Then the same work is generated with a look each
second and without, interleaved: the ratio of tokens per second should be at least 0.99.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from benchmarks.generation_throughput import group_orders
from benchmarks.measuring import cpu_seconds, interval, show, spread, verdict
from gpu_workers.controller.ports import GroupOrder, KnownCall, SiblingResult
from gpu_workers.generation.generator_actor import GENERATOR_ACTOR_OPTIONS, GeneratorActor
from gpu_workers.generation.generator_client import GeneratorClient
from gpu_workers.generation.model_calls import ModelCalls
from gpu_workers.generation.peek_wire import PeekMessage
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.generation.sampling import sampling_settings
from gpu_workers.generation.sibling_runner import SiblingRunner
from gpu_workers.models.tiny import ensure_model
from storage.records import rollout_id
from storage.run_config import RunConfig

SIBLINGS = 8
RUNNING = (16, 64, 256)
TOKENS = 512
LOOK_EVERY_S = 0.25
LIMIT = 0.99


class PeekedActor(GeneratorActor):
    """The generator with answers that no token ends; it says what its peeks cost its thread."""

    def __init__(self, config: RunConfig, model_dir: Path, index: int) -> None:
        super().__init__(config, model_dir, index)
        chosen: Any = type(self._engine.sampling)
        self._engine = replace(self._engine, sampling=chosen(sampling_settings(config, ())))
        calls = ModelCalls(config, self._engine, self._name, self._book)
        self._siblings = SiblingRunner(config, calls, self._task, self._name)
        self._thread_s: list[float] = []

    async def peek(self, wanted: Mapping[str, tuple[int, int, int]] | None) -> PeekMessage:
        """As it is, timed; nothing else runs meanwhile, since it never waits."""
        began = time.thread_time()
        message = await super().peek(wanted)
        self._thread_s.append(time.thread_time() - began)
        return message

    async def thread_seconds(self) -> list[float]:
        """Of each peek since the last time that this was asked."""
        taken, self._thread_s = self._thread_s, []
        return taken


@dataclass
class Looks:
    """Looks at the running calls of groups: for each, the calls that ran, the tokens it brought, and milliseconds from
    asking to having them.
    """

    client: GeneratorClient
    known: dict[str, KnownCall]
    calls: list[int]
    tokens: list[int]
    ms: list[float]

    @classmethod
    def at(cls, client: GeneratorClient, orders: list[GroupOrder]) -> "Looks":
        """Nothing is known yet."""
        names = (rollout_id(order.group_id, index) for order in orders for index in range(SIBLINGS))
        return cls(client, {name: KnownCall(0) for name in names}, [], [], [])

    async def look(self, *, everything: bool) -> None:
        """One look; what it brings is known afterwards, unless everything is asked for each time."""
        began = time.perf_counter()
        peek = await self.client.peek(self.known)
        self.ms.append(1000 * (time.perf_counter() - began))
        self.calls.append(sum(not call.finish_reason for call in peek.calls))
        self.tokens.append(sum(len(call.sampled) for call in peek.calls))
        if not everything:
            for call in peek.calls:
                self.known[call.rollout_id] = KnownCall(0, call.turn, call.start + len(call.sampled))


async def generate(client: GeneratorClient, orders: list[GroupOrder]) -> int:
    """All groups together; tokens sampled."""

    async def group(order: GroupOrder) -> int:
        tokens = 0
        async for result in client.generate(order):
            assert isinstance(result, SiblingResult), result
            assert result.calls is not None, result
            tokens += len(result.calls.column("token_ids")[0])
        return tokens

    return sum(await asyncio.gather(*map(group, orders)))


async def row_of(handle: Any, orders: list[GroupOrder], *, everything: bool) -> list[str]:
    """A line of the table: looks while all calls of these groups run."""
    client = GeneratorClient(handle)
    looks, running = Looks.at(client, orders), SIBLINGS * len(orders)
    generating = asyncio.create_task(generate(client, orders))
    await handle.thread_seconds.remote()
    while not generating.done():
        await asyncio.sleep(LOOK_EVERY_S)
        await looks.look(everything=everything)
    await generating
    thread_s = await handle.thread_seconds.remote()
    counted = [number for number, calls in enumerate(looks.calls) if calls == running and looks.tokens[number]]
    return [
        f"{running}, {'all tokens' if everything else 'new tokens'}",
        spread([looks.tokens[number] / running for number in counted], 0),
        spread([1e6 * thread_s[number] / running for number in counted], 1),
        spread([1e3 * thread_s[number] for number in counted], 2),
        spread([looks.ms[number] for number in counted], 1),
        str(len(counted)),
    ]


async def rates(
    client: GeneratorClient, orders: list[GroupOrder], pid: int, *, look_every_s: float | None
) -> tuple[float, float]:
    """Tokens per second and per processor second of the generator's processes, with looks or without."""
    looks = Looks.at(client, orders)

    async def look() -> None:
        while look_every_s is not None:
            await asyncio.sleep(look_every_s)
            await looks.look(everything=False)

    looking, began, cpu = asyncio.create_task(look()), time.perf_counter(), cpu_seconds(pid)
    tokens = await generate(client, orders)
    seconds, cpu = time.perf_counter() - began, cpu_seconds(pid) - cpu
    looking.cancel()
    with suppress(asyncio.CancelledError):
        await looking
    return tokens / seconds, tokens / cpu


async def ratios(
    client: GeneratorClient, orders: list[GroupOrder], pid: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Both rates with a look each second to without, round by round, after one round to warm up."""
    by_time, by_cpu = [], []
    for number in range(rounds + 1):
        found = {}
        for every in (1.0, None) if number % 2 else (None, 1.0):
            found[every] = await rates(client, orders, pid, look_every_s=every)
        if number:
            by_time.append(found[1.0][0] / found[None][0])
            by_cpu.append(found[1.0][1] / found[None][1])
    return by_time, by_cpu


async def measure(handle: Any, config: RunConfig, rounds: int) -> None:
    """Both tables."""
    pid = (await handle.ready.remote())["pid"]
    client = GeneratorClient(handle)
    await generate(client, group_orders(config, 2))
    rows = [
        await row_of(handle, group_orders(config, running // SIBLINGS), everything=everything)
        for running in RUNNING
        for everything in (False, True)
    ]
    columns = ["running calls", "tokens per call", "CPU µs per call", "CPU ms in all", "there and back, ms", "looks"]
    show(f"A look at running calls of up to {TOKENS} tokens, every {LOOK_EVERY_S} s", columns, rows)
    by_time, by_cpu = await ratios(client, group_orders(config, 64 // SIBLINGS), pid, rounds)
    show(
        "64 calls with a look each second, to without",
        ["", "mean", "90 % interval", "median (range)", ""],
        [ratio_of("tokens per second", by_time), ratio_of("tokens per processor second of the generator", by_cpu)],
    )


def ratio_of(name: str, values: list[float]) -> tuple[str, ...]:
    """One ratio, and whether the requirement holds, as far as these rounds can tell."""
    low, high = interval(values)
    return name, f"{statistics.fmean(values):.3f}", f"{low:.3f}-{high:.3f}", spread(values, 3), verdict(values, LIMIT)


def main() -> None:
    """Start a generator, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    config = RunConfig.model_validate(
        {
            "name": "peeks",
            "policy": {"warm_start_steps": 0},
            "generation": {"max_new_tokens": TOKENS, "max_model_len": TOKENS + 64, "kv_cache_bytes": 512 << 20},
            "rollout_recovery": {"target_level": "prefix"},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
        actor: Any = ray.remote(PeekedActor)
        handle = actor.options(
            **GENERATOR_ACTOR_OPTIONS, num_cpus=0, runtime_env={"env_vars": generator_env(config)}
        ).remote(config, str(ensure_model(config, Path(folder))), 0)
        asyncio.run(measure(handle, config, arguments.rounds))
        ray.shutdown()


if __name__ == "__main__":
    main()
