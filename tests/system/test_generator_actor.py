"""The generator as a Ray actor: streaming, control calls, refits of running groups, aborts, deaths.

The tests share one actor and run in this order; the last ones end it.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.exceptions import RayActorError
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from gpu_workers.controller.ports import GroupOrder, SiblingOrder, SiblingResult, WeightsRef
from gpu_workers.environments.tasks import build_task
from gpu_workers.generation.generator_actor import GENERATOR_ACTOR_OPTIONS, GeneratorActor
from gpu_workers.generation.generator_client import GeneratorClient
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.models.tiny import ensure_model
from storage.errors import InfrastructureFailure
from storage.records import Prompt, PromptRef, RowKind
from storage.run_config import RunConfig
from storage.schemas import row_digest

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore"),  # transformers and Ray warn on import
    pytest.mark.asyncio(loop_scope="module"),  # one client belongs to one loop
]

# Random weights: an answer ends after some 55 tokens, now and then after a few or after 256.
CONFIG = RunConfig(
    name="generator-actor",
    policy={"warm_start_steps": 0, "tie_word_embeddings": False},
    generation={"max_new_tokens": 256, "max_model_len": 320, "max_num_seqs": 64},
)
TASK = build_task(CONFIG.data)


@dataclass(frozen=True)
class Actor:
    """The actor's handle and client with the folder it was started on and its process ids."""

    handle: Any
    client: GeneratorClient
    model_dir: Path
    pids: dict[str, Any]

    async def collect(self, order: GroupOrder) -> list[SiblingResult]:
        """All siblings, in the order they came."""
        return [result async for result in self.client.generate(order)]


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actor]:
    """A generator actor of an untied model in a Ray of its own."""
    model_dir = ensure_model(CONFIG, tmp_path_factory.mktemp("models"))
    ray.init(address="local", num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    handle = (
        ray.remote(GeneratorActor)
        .options(**GENERATOR_ACTOR_OPTIONS, num_cpus=0, runtime_env={"env_vars": generator_env(CONFIG)})
        .remote(CONFIG, str(model_dir), 0)
    )
    yield Actor(handle, GeneratorClient(handle), model_dir, ray.get(handle.ready.remote()))
    ray.shutdown()


def order(ordinal: int, *, siblings: int = 8, attempt: int = 0) -> GroupOrder:
    """The order of one prompt's siblings."""
    token_ids, task_json = TASK.prompt(ordinal)
    prompt = Prompt(PromptRef(ordinal, 0, "hash"), token_ids, task_json)
    return GroupOrder(prompt.ref.group_id, prompt, tuple(SiblingOrder(index, attempt) for index in range(siblings)))


def captured(result: SiblingResult) -> dict[str, Any]:
    """The only call of a successful result, as a dict."""
    assert result.failure is None
    assert result.calls is not None
    (call,) = result.calls.to_pylist()
    return call


def perturbed(folder: Path, target: Path, *, seed: int) -> Path:
    """The folder's weights after an imaginary optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: w + 0.2 * w.std() * torch.randn(w.shape, generator=generator) for k, w in tensors.items()}, target)
    return target


@torch.no_grad()
def mismatch(folder: Path, weights: Path, call: dict[str, Any]) -> float:
    """The largest |log p(generator) - log p(torch)| over the sampled tokens."""
    model = Qwen2ForCausalLM.from_pretrained(folder)
    model.load_state_dict(load_file(weights))
    prompt, sampled = call["prompt_token_ids"], call["token_ids"]
    logits = model.eval()(input_ids=torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(sampled)), torch.tensor(sampled)]
    return float((expected - torch.tensor(call["logprobs"])).abs().max())


async def test_siblings_arrive_in_the_order_in_which_they_finish(actor: Actor):
    results = await actor.collect(order(0, siblings=16))
    lengths = [len(captured(result)["token_ids"]) for result in results]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert sorted(result.generation_index for result in results) == list(range(16))


async def test_rows_are_named_after_their_attempt_and_carry_their_digest(actor: Actor):
    for result in await actor.collect(order(1, siblings=2, attempt=3)):
        call = captured(result)
        assert call["row_id"] == f"e0-p1_g{result.generation_index}/a3/t0"
        assert call["digest"] == row_digest(RowKind.STAGED_CALL, call)
        assert (call["version_starts"], call["versions"]) == ([0], [0])
        assert 0.0 <= result.reward <= 1.0


async def test_a_refit_in_mid_run_keeps_running_calls_whose_tokens_carry_two_versions(actor: Actor, tmp_path: Path):
    weights = perturbed(actor.model_dir, tmp_path / "model.safetensors", seed=1)
    running = actor.client.generate(order(2, siblings=32))
    results = [await anext(running)]  # the group is running, and a control call does not wait for its end
    timings = await actor.handle.load_weights.remote(WeightsRef(1, str(weights)))
    results += [result async for result in running]
    versions = [captured(result)["versions"] for result in results]
    assert len(results) == 32
    assert [0, 1] in versions
    assert timings["load_s"] > 0


async def test_after_a_refit_the_untied_model_agrees_with_torch(actor: Actor, tmp_path: Path):
    for version in (2, 3):
        weights = perturbed(actor.model_dir, tmp_path / "model.safetensors", seed=version)
        await actor.handle.load_weights.remote(WeightsRef(version, str(weights)))
        for result in await actor.collect(order(3, siblings=2)):
            call = captured(result)
            assert call["versions"] == [version]
            assert mismatch(actor.model_dir, weights, call) < 1e-3


async def test_abort_ends_the_calls_still_running_after_the_first_sibling_as_infrastructure_failures(actor: Actor):
    running = actor.client.generate(order(4, siblings=32))
    await anext(running)
    await actor.handle.abort.remote("unknown")
    await actor.handle.abort.remote("e0-p4")
    failures = [result.failure for result in [result async for result in running] if result.failure is not None]
    assert len(failures) > 16
    assert {(failure.infrastructure, failure.message) for failure in failures} == {(True, "group e0-p4 was aborted")}


async def test_a_failed_refit_pauses_the_engine_until_one_succeeds(actor: Actor, tmp_path: Path):
    unfit = tmp_path / "unfit.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(3, 3)}, unfit)
    with pytest.raises(InfrastructureFailure, match=r"does not fit the engine's model.*engine is paused: load weights"):
        await actor.handle.load_weights.remote(WeightsRef(4, str(unfit)))
    waiting = asyncio.ensure_future(actor.collect(order(5, siblings=2)))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    await actor.handle.load_weights.remote(WeightsRef(4, str(actor.model_dir / "model.safetensors")))
    assert {tuple(captured(result)["versions"]) for result in await waiting} == {(4,)}


async def test_a_dead_engine_is_an_infrastructure_failure_of_every_call(actor: Actor):
    (engine,) = actor.pids["engine_pids"]
    running = actor.client.generate(order(6, siblings=32))
    await anext(running)
    os.kill(engine, 9)
    with pytest.raises(InfrastructureFailure, match="its engine died during .*; start it again"):
        [result async for result in running]
    with pytest.raises(InfrastructureFailure, match="engine is dead: start the generator again"):
        await actor.handle.load_weights.remote(WeightsRef(5, str(actor.model_dir / "model.safetensors")))


async def test_nothing_is_left_of_a_killed_actor(actor: Actor):
    process = psutil.Process(actor.pids["pid"])
    family = [process, *process.children(recursive=True)]
    os.kill(process.pid, 9)
    with pytest.raises(RayActorError):
        await actor.collect(order(7))
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [p.pid for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
