"""Siblings on a real vLLM engine: sampling that repeats, its distribution, refits that agree with torch."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from gpu_workers.controller.ports import GroupOrder, SiblingOrder, SiblingResult, WeightsRef
from gpu_workers.environments.tasks import Task, build_task
from gpu_workers.generation.engine import Engine, start_engine
from gpu_workers.generation.engine_weights import EngineWeights
from gpu_workers.generation.model_calls import ModelCalls
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.generation.sampling import CounterSampling, sampling_settings
from gpu_workers.generation.sibling_runner import SiblingRunner
from gpu_workers.models.tiny import ensure_model
from storage.records import Prompt, PromptRef
from storage.run_config import RunConfig

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore"),  # vLLM and its dependencies warn on import
    pytest.mark.asyncio(loop_scope="module"),
]

CONFIG = RunConfig(
    name="generation",
    policy={"warm_start_steps": 100},
    generation={"max_new_tokens": 24, "max_num_seqs": 64},
)
CANARY = 1e-3


@dataclass(frozen=True)
class Generation:
    """An engine in this process's child, with its weights and the folder it was started on."""

    config: RunConfig
    task: Task
    engine: Engine
    weights: EngineWeights
    model_dir: Path

    def runner(self, **generation: Any) -> SiblingRunner:
        """A sibling runner on the same engine with other generation settings."""
        config = self.config.model_copy(
            update={"generation": self.config.generation.model_copy(update=generation)},
        )
        sampling = CounterSampling(sampling_settings(config, self.task.stop_token_ids))
        calls = ModelCalls(config, replace(self.engine, sampling=sampling), "generator 0")
        return SiblingRunner(config, calls, self.task, "generator 0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Generation]:
    """The engine of a tied model that was warmed up a little."""
    model_dir = ensure_model(CONFIG, tmp_path_factory.mktemp("models"))
    task = build_task(CONFIG.data)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in generator_env(CONFIG).items():
            patch.setenv(name, value)
        engine = start_engine(CONFIG, model_dir, stop_token_ids=task.stop_token_ids)
    yield Generation(CONFIG, task, engine, EngineWeights(engine.llm, "generator 0"), model_dir)
    engine.llm.shutdown()


def order(
    task: Task, ordinal: int, *, indices: Sequence[int] = range(4), attempt: int = 0, epoch: int = 0
) -> GroupOrder:
    """The order of one prompt's siblings."""
    token_ids, task_json = task.prompt(ordinal)
    prompt = Prompt(PromptRef(ordinal, epoch, "hash"), token_ids, task_json)
    return GroupOrder(prompt.ref.group_id, prompt, tuple(SiblingOrder(index, attempt) for index in indices))


async def run(runner: SiblingRunner, *orders: GroupOrder) -> dict[tuple[str, int], dict[str, Any]]:
    """Run all siblings at once; the captured call of each."""
    calls = {(o.group_id, s.generation_index): runner.run(o, s) for o in orders for s in o.siblings}
    results = await asyncio.gather(*calls.values())
    assert [result.failure for result in results] == [None] * len(results)
    return {key: captured(result) for key, result in zip(calls, results, strict=True)}


def captured(result: SiblingResult) -> dict[str, Any]:
    """The only call of a result, as a dict."""
    assert result.calls is not None
    (call,) = result.calls.to_pylist()
    return call


def samples(calls: dict[tuple[str, int], dict[str, Any]]) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
    """Tokens and log-probabilities only."""
    return {key: (call["token_ids"], call["logprobs"]) for key, call in calls.items()}


def torch_model(folder: Path, weights: Path | None = None) -> Qwen2ForCausalLM:
    """The trainer's view of the model, with the weights of a refit."""
    model = Qwen2ForCausalLM.from_pretrained(folder)
    if weights is not None:
        model.load_state_dict(load_file(weights), strict=False)
        model.tie_weights()
    return model.eval()


@torch.no_grad()
def mismatch(model: Qwen2ForCausalLM, call: dict[str, Any], *, temperature: float = 1.0) -> float:
    """The largest |log p(generator) - log p(torch)| over the sampled tokens."""
    prompt, sampled = call["prompt_token_ids"], call["token_ids"]
    logits = model(input_ids=torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    expected = (logits / temperature).log_softmax(-1)[torch.arange(len(sampled)), torch.tensor(sampled)]
    return float((expected - torch.tensor(call["logprobs"])).abs().max())


def perturbed(folder: Path, target: Path, *, seed: int) -> Path:
    """The folder's weights after an imaginary optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    noisy = {name: w + 0.05 * w.std() * torch.randn(w.shape, generator=generator) for name, w in tensors.items()}
    save_file(noisy, target)
    return target


async def test_a_sibling_is_the_same_for_any_attempt_batch_and_order(generation: Generation):
    runner, task = generation.runner(), generation.task
    alone: dict[tuple[str, int], Any] = {}
    for index in range(4):
        alone |= samples(await run(runner, order(task, 0, indices=[index])))
    crowd = [order(task, n, attempt=3, indices=range(3, -1, -1)) for n in (5, 0, 9, 2, 7, 1, 8, 4, 3, 6)]
    together = samples(await run(runner, *crowd))
    assert {key: together[key] for key in alone} == alone


async def test_another_generation_index_prompt_or_epoch_samples_other_tokens(generation: Generation):
    runner, task = generation.runner(temperature=3.0), generation.task  # so hot that equal answers mean equal noise
    calls = await run(runner, order(task, 0, indices=range(8)), order(task, 0, indices=range(8), epoch=1))
    assert len({tuple(call["token_ids"]) for call in calls.values()}) == len(calls)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
async def test_first_tokens_are_distributed_as_softmax_of_logits_over_temperature(
    generation: Generation, temperature: float
):
    runner = generation.runner(temperature=temperature, max_new_tokens=1)
    one = order(generation.task, 11, indices=range(4000))
    calls = await run(runner, one)
    counts = np.bincount([call["token_ids"][0] for call in calls.values()], minlength=generation.task.vocab_size)
    model = torch_model(generation.model_dir)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([one.prompt.token_ids])).logits[0, -1]
    expected = 4000 * (logits / temperature).softmax(-1).numpy()
    assert chi_squared_excess(counts, expected) < 4.5
    assert max(mismatch(model, call, temperature=temperature) for call in list(calls.values())[:20]) < CANARY


def chi_squared_excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the chi-squared statistic lies above its mean; rare tokens count together."""
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    degrees = len(seen) - 1
    return float(((seen - wanted) ** 2 / wanted).sum() - degrees) / math.sqrt(2 * degrees)


async def test_top_p_draws_from_the_nucleus_and_reports_log_probabilities_of_the_whole_distribution(
    generation: Generation,
):
    one = order(generation.task, 12, indices=range(2000))
    calls = await run(generation.runner(top_p=0.6, temperature=2.0, max_new_tokens=1), one)
    counts = np.bincount([call["token_ids"][0] for call in calls.values()], minlength=generation.task.vocab_size)
    model = torch_model(generation.model_dir)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([one.prompt.token_ids])).logits[0, -1]
    ordered, tokens = (logits / 2.0).softmax(-1).sort(descending=True)
    size = int((ordered.cumsum(0) < 0.6).sum()) + 1
    assert 1 < size < generation.task.vocab_size
    expected = np.zeros(len(counts))
    expected[tokens[:size]] = 2000 * ordered[:size] / ordered[:size].sum()
    assert set(np.flatnonzero(counts)) == set(tokens[:size].tolist())
    assert chi_squared_excess(counts, expected) < 4.5
    assert max(mismatch(model, call, temperature=2.0) for call in list(calls.values())[:20]) < CANARY


async def test_a_completion_ends_with_a_stop_token_or_at_its_length(generation: Generation):
    calls = await run(generation.runner(max_new_tokens=10), *(order(generation.task, n) for n in range(8)))
    stop = generation.task.stop_token_ids[0]
    reasons = {call["finish_reason"] for call in calls.values()}
    assert reasons == {"stop", "length"}
    for call in calls.values():
        assert (stop in call["token_ids"]) == (call["finish_reason"] == "stop")
        assert call["token_ids"].index(stop) == len(call["token_ids"]) - 1 if stop in call["token_ids"] else True
        assert len(call["token_ids"]) == 10 or call["finish_reason"] == "stop"


async def test_a_score_that_fails_and_a_prompt_that_is_too_long_are_the_datas_fault(generation: Generation):
    good = order(generation.task, 0, indices=[0])
    unscorable = replace(good, prompt=replace(good.prompt, task_json="{}"))
    too_long = replace(good, prompt=replace(good.prompt, token_ids=(5,) * 64))
    for bad, message in ((unscorable, "can't be scored by task 'sort8'"), (too_long, "has 64 tokens")):
        failure = (await generation.runner().run(bad, bad.siblings[0])).failure
        assert failure is not None
        assert not failure.infrastructure
        assert message in failure.message


async def test_after_every_refit_the_generator_agrees_with_torch(generation: Generation, tmp_path: Path):
    target = tmp_path / "model.safetensors"
    for version in (1, 2, 3):
        perturbed(generation.model_dir, target, seed=version)
        await generation.weights.load(WeightsRef(version, str(target)))
        calls = await run(generation.runner(), *(order(generation.task, n) for n in range(4)))
        model = torch_model(generation.model_dir, target)
        assert max(mismatch(model, call) for call in calls.values()) < CANARY
        assert {tuple(call["versions"]) for call in calls.values()} == {(version,)}


async def test_a_refit_with_equal_weights_in_mid_run_changes_no_token(generation: Generation):
    runner, orders = generation.runner(), [order(generation.task, n, indices=range(16)) for n in range(4)]
    await generation.weights.load(WeightsRef(4, str(generation.model_dir / "model.safetensors")))
    undisturbed = samples(await run(runner, *orders))
    running = [asyncio.create_task(run(runner, replace(o, siblings=(s,)))) for o in orders for s in o.siblings]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await generation.weights.load(WeightsRef(5, str(generation.model_dir / "model.safetensors")))
    disturbed = {key: call for calls in await asyncio.gather(*running) for key, call in calls.items()}
    assert any(call["versions"] == [4, 5] for call in disturbed.values())
    assert samples(disturbed) == undisturbed
