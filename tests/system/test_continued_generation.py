"""A real engine's running calls: read without disturbing them, continued bit by bit the same, readable after its death.

The tests share one actor and run in this order; the last one kills its engine.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from gpu_workers.controller.ports import (
    GroupOrder,
    KnownCall,
    PartialCompletion,
    PeekedCall,
    RolloutResult,
    SampledTokens,
    SiblingOrder,
    SiblingResult,
    WeightsRef,
)
from gpu_workers.environments.tasks import build_task
from gpu_workers.generation.generator_actor import GENERATOR_ACTOR_OPTIONS, GeneratorActor
from gpu_workers.generation.generator_client import GeneratorClient
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.models.tiny import ensure_model
from storage.errors import InfrastructureFailure
from storage.records import Prompt, PromptRef, rollout_id
from storage.run_config import RunConfig

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore"),  # transformers and Ray warn on import
    pytest.mark.asyncio(loop_scope="module"),  # one client belongs to one loop
]

# Random weights: an answer ends after some 50 tokens, now and then after a few or after all that it may have. Most
# siblings wait while eight run, so that a group never ends right after its first one.
CONFIG = RunConfig(
    name="continued-generation",
    policy={"warm_start_steps": 0, "tie_word_embeddings": False},
    generation={"max_new_tokens": 64, "max_model_len": 320, "max_num_seqs": 8, "temperature": 0.9, "top_p": 0.95},
    rollout_recovery={"target_level": "prefix"},
)
TASK = build_task(CONFIG.data)
SIBLINGS = 24

Sampled = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Actor:
    """The actor's handle and client with the folder it was started on and its process ids."""

    handle: Any
    client: GeneratorClient
    model_dir: Path
    pids: dict[str, Any]

    async def collect(self, order: GroupOrder) -> dict[str, dict[str, Any]]:
        """The captured call of each sibling, by rollout."""
        return calls_of([result async for result in self.client.generate(order)])


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actor]:
    """A generator actor in a Ray of its own."""
    model_dir = ensure_model(CONFIG, tmp_path_factory.mktemp("models"))
    ray.init(address="local", num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    handle = (
        ray.remote(GeneratorActor)
        .options(**GENERATOR_ACTOR_OPTIONS, num_cpus=0, runtime_env={"env_vars": generator_env(CONFIG)})
        .remote(CONFIG, str(model_dir), 0)
    )
    yield Actor(handle, GeneratorClient(handle), model_dir, ray.get(handle.ready.remote()))
    ray.shutdown()


def order(siblings: Sequence[SiblingOrder], ordinal: int = 0) -> GroupOrder:
    """Siblings of one prompt."""
    token_ids, task_json = TASK.prompt(ordinal)
    prompt = Prompt(PromptRef(ordinal, 0, "hash"), token_ids, task_json)
    return GroupOrder(prompt.ref.group_id, prompt, tuple(siblings), keeps_running=True)


def calls_of(results: Sequence[RolloutResult]) -> dict[str, dict[str, Any]]:
    """The captured calls by rollout; nothing else was said."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        assert isinstance(result, SiblingResult)
        assert result.failure is None
        assert result.calls is not None
        (call,) = result.calls.to_pylist()
        found[call["rollout_id"]] = call
    return found


def beginning(call: PeekedCall, tokens: int) -> PartialCompletion:
    """The first tokens of a whole call, all under one version."""
    whole = call.sampled
    assert (call.start, whole.version_starts) == (0, (0,))
    first = SampledTokens(whole.token_ids[:tokens], whole.logprobs[:tokens], (0,), whole.versions)
    return PartialCompletion(call.turn, call.prompt_digest, call.sampling, first)


def prefixes(whole: PeekedCall) -> list[int]:
    """One token, some in between, all but one, and all."""
    length = len(whole.sampled)
    return sorted({1, 2, length // 3, length // 2, length - 1, length} & set(range(1, length + 1)))


def assert_prefix(seen: PeekedCall, call: dict[str, Any]) -> None:
    """What was seen is exactly what the call has there."""
    end = seen.start + len(seen.sampled)
    assert end <= len(call["token_ids"])
    assert seen.sampled.token_ids.tolist() == call["token_ids"][seen.start : end]
    assert seen.sampled.logprobs.tolist() == call["logprobs"][seen.start : end]


@pytest.fixture(scope="module")
def whole(actor: Actor) -> dict[str, PeekedCall]:
    """Filled by the first test: the uninterrupted calls of a group, by rollout."""
    return {}


async def test_every_look_at_running_calls_is_an_exact_prefix_of_their_ends(actor: Actor, whole: dict[str, PeekedCall]):
    group = order([SiblingOrder(index, 0) for index in range(SIBLINGS)])
    known = {rollout_id(group.group_id, index): KnownCall(0) for index in range(SIBLINGS)}
    running = asyncio.ensure_future(actor.collect(group))
    seen: list[PeekedCall] = []
    while not running.done():
        peek = await actor.client.peek(known)
        assert peek.unreadable == {}
        seen += peek.calls
        known |= {call.rollout_id: KnownCall(0, tokens=call.start + len(call.sampled)) for call in peek.calls}
    calls = running.result()
    for look in seen:
        assert_prefix(look, calls[look.rollout_id])
    assert any(look.start > 0 and not look.finish_reason for look in seen)  # it was looked at while it ran
    ended = await actor.client.peek(dict.fromkeys(known, KnownCall(0)))
    whole.update((call.rollout_id, call) for call in ended.calls)
    assert whole.keys() == calls.keys()
    assert {call.finish_reason for call in ended.calls} == {"stop", "length"}
    for call in ended.calls:
        assert call.finish_reason == calls[call.rollout_id]["finish_reason"]
        assert len(call.sampled) == len(calls[call.rollout_id]["token_ids"])
        assert_prefix(call, calls[call.rollout_id])


async def test_of_calls_that_nobody_wants_any_more_nothing_stays(actor: Actor):
    assert len((await actor.client.peek(None)).calls) == SIBLINGS
    await actor.client.peek({})
    assert (await actor.client.peek(None)).calls == ()


async def test_an_aborted_call_keeps_its_tokens_for_who_wants_them(actor: Actor, whole: dict[str, PeekedCall]):
    running = actor.client.generate(order([SiblingOrder(index, 0) for index in range(SIBLINGS)]))
    results = [await anext(running)]
    wanted = dict.fromkeys(whole, KnownCall(0))
    before = {call.rollout_id: call for call in (await actor.client.peek(wanted)).calls}
    await actor.client.abort("e0-p0")
    results += [result async for result in running]
    failed = {
        f"e0-p0_g{result.generation_index}"
        for result in results
        if isinstance(result, SiblingResult) and result.failure is not None
    }
    assert failed
    assert sum(len(before[rollout].sampled) for rollout in failed) > 0
    kept = {call.rollout_id: call for call in (await actor.client.peek(wanted)).calls}
    for rollout in failed:
        assert kept[rollout].finish_reason == ""
        length = len(kept[rollout].sampled)
        assert length >= len(before[rollout].sampled)
        assert kept[rollout].sampled.token_ids.tolist() == whole[rollout].sampled.token_ids[:length].tolist()


async def test_a_call_continued_from_any_prefix_is_bitwise_the_uninterrupted_one(
    actor: Actor, whole: dict[str, PeekedCall]
):
    assert len(whole) == SIBLINGS
    for executed, place in enumerate((0, 1, 2, 3, -2, -1), start=1):
        siblings = [
            SiblingOrder(index, 0, environment_attempt=executed, partial=beginning(call, prefixes(call)[place]))
            for index in range(SIBLINGS)
            if len(prefixes(call := whole[f"e0-p0_g{index}"])) > 3
        ]
        assert len(siblings) > SIBLINGS // 2
        for rollout, call in (await actor.collect(order(siblings))).items():
            assert call["token_ids"] == whole[rollout].sampled.token_ids.tolist()
            assert call["logprobs"] == whole[rollout].sampled.logprobs.tolist()
            assert (call["version_starts"], call["versions"]) == ([0], [0])
            assert (call["finish_reason"], call["row_id"]) == (whole[rollout].finish_reason, f"{rollout}/a0/t0")


async def test_a_call_continued_under_other_weights_keeps_the_versions_of_its_tokens(
    actor: Actor, whole: dict[str, PeekedCall], tmp_path: Path
):
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(actor.model_dir / "model.safetensors")
    noisy = {name: w + 0.2 * w.std() * torch.randn(w.shape, generator=generator) for name, w in tensors.items()}
    save_file(noisy, tmp_path / "model.safetensors")
    await actor.client.load_weights(WeightsRef(1, str(tmp_path / "model.safetensors")))
    long = {rollout: call for rollout, call in whole.items() if len(call.sampled) > 20}
    siblings = [
        SiblingOrder(int(rollout.rpartition("_g")[2]), 0, environment_attempt=7, partial=beginning(call, 10))
        for rollout, call in long.items()
    ]
    for rollout, call in (await actor.collect(order(siblings))).items():
        assert (call["version_starts"], call["versions"]) == ([0, 10], [0, 1])
        assert call["logprobs"][:10] == whole[rollout].sampled.logprobs[:10].tolist()
    await actor.client.load_weights(WeightsRef(0, str(actor.model_dir / "model.safetensors")))


async def test_after_the_engine_was_killed_its_tokens_are_read_through_the_actor(
    actor: Actor, whole: dict[str, PeekedCall]
):
    (engine,) = actor.pids["engine_pids"]
    siblings = [SiblingOrder(index, 0, environment_attempt=8) for index in range(SIBLINGS)]
    running = asyncio.ensure_future(actor.collect(order(siblings)))
    wanted = dict.fromkeys(whole, KnownCall(8))
    before: dict[str, PeekedCall] = {}
    while sum(len(call.sampled) for call in before.values()) < 4 * SIBLINGS:
        assert not running.done()
        before = {call.rollout_id: call for call in (await actor.client.peek(wanted)).calls}
    os.kill(engine, 9)
    with pytest.raises(InfrastructureFailure, match="its engine died during .*; start it again"):
        await running
    for peek in (await actor.client.peek(None), await actor.client.peek(wanted)):
        assert peek.unreadable == {}
        after = {call.rollout_id: call for call in peek.calls}
        assert after.keys() == whole.keys()
        for rollout, call in after.items():
            assert len(call.sampled) >= len(before[rollout].sampled)
            expected = replace(whole[rollout], sampled=call.sampled)
            assert call.prompt_digest == expected.prompt_digest
            assert call.sampling == expected.sampling
            length = len(call.sampled)
            assert call.sampled.token_ids.tolist() == whole[rollout].sampled.token_ids[:length].tolist()
            assert call.sampled.logprobs.tolist() == whole[rollout].sampled.logprobs[:length].tolist()
