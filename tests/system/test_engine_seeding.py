"""`generation.seeding: engine` on a real engine: vLLM's own seeded sampling repeats whole calls, and only those."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import Qwen2ForCausalLM

from gpu_workers.controller.ports import DiscardedPartial, GroupOrder, PartialCompletion, RolloutResult, SiblingOrder
from gpu_workers.controller.sampled_tokens import sampled_tokens
from gpu_workers.environments.tasks import build_task
from gpu_workers.generation.capture import Completion
from gpu_workers.generation.counter_seeds import sampling_seed
from gpu_workers.generation.engine import Engine, start_engine
from gpu_workers.generation.model_calls import ModelCalls
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.generation.sibling_runner import SiblingRunner
from gpu_workers.models.tiny import ensure_model
from storage.records import Prompt, PromptRef
from storage.run_config import RunConfig
from storage.schemas import prompt_digest

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore"),  # vLLM and its dependencies warn on import
    pytest.mark.asyncio(loop_scope="module"),
]

# More siblings wait than run together, and long prompts do not fit into one step (8192 tokens) together.
CONFIG = RunConfig(
    name="engine-seeding",
    policy={"warm_start_steps": 0},
    generation={
        "seeding": "engine",
        "temperature": 0.8,
        "max_new_tokens": 48,
        "max_num_seqs": 8,
        "max_model_len": 2048,
    },
)
TASK = build_task(CONFIG.data)
CANARY = 1e-3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    return ensure_model(CONFIG, tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir: Path) -> AsyncIterator[Engine]:
    """An engine without the counter sampler."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in generator_env(CONFIG).items():
            patch.setenv(name, value)
        engine = start_engine(CONFIG, model_dir, stop_token_ids=TASK.stop_token_ids)
    yield engine
    engine.llm.shutdown()


@pytest.fixture(scope="module")
def calls(engine: Engine) -> ModelCalls:
    """Model calls of it."""
    return ModelCalls(CONFIG, engine, "generator 0")


@pytest.fixture(scope="module")
def runner(calls: ModelCalls) -> SiblingRunner:
    """Siblings on it."""
    return SiblingRunner(CONFIG, calls, TASK, "generator 0")


def order(ordinal: int, siblings: Sequence[SiblingOrder]) -> GroupOrder:
    """Siblings of one prompt."""
    token_ids, task_json = TASK.prompt(ordinal)
    prompt = Prompt(PromptRef(ordinal, 0, "hash"), token_ids, task_json)
    return GroupOrder(prompt.ref.group_id, prompt, tuple(siblings))


async def run(runner: SiblingRunner, *orders: GroupOrder) -> dict[str, dict[str, Any]]:
    """All siblings at once; the captured call of each by rollout."""
    results = await asyncio.gather(*(runner.run(o, sibling) for o in orders for sibling in o.siblings))
    assert [result.failure for result in results] == [None] * len(results)
    calls = [result.calls.to_pylist()[0] for result in results if result.calls is not None]
    return {call["rollout_id"]: call for call in calls}


@torch.no_grad()
def mismatch(model: Qwen2ForCausalLM, call: dict[str, Any]) -> float:
    """The largest |log p(generator) - log p(torch)| over the sampled tokens, at the temperature of sampling."""
    prompt, sampled = call["prompt_token_ids"], call["token_ids"]
    logits = model(input_ids=torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    expected = (logits / CONFIG.generation.temperature).log_softmax(-1)[
        torch.arange(len(sampled)), torch.tensor(sampled)
    ]
    return float((expected - torch.tensor(call["logprobs"])).abs().max())


async def test_a_whole_call_is_repeated_by_another_attempt_in_another_batch_and_siblings_differ(runner: SiblingRunner):
    group = order(0, [SiblingOrder(index, 0) for index in range(8)])
    first = await run(runner, group)
    crowd = [order(n, [SiblingOrder(index, 1) for index in range(7, -1, -1)]) for n in (3, 0, 2, 1)]
    again = await run(runner, *crowd)
    assert {rollout: again[rollout]["token_ids"] for rollout in first} == {r: c["token_ids"] for r, c in first.items()}
    assert len({tuple(call["token_ids"]) for call in first.values()}) == 8


async def test_its_log_probabilities_are_those_that_a_trainer_computes(runner: SiblingRunner, model_dir: Path):
    model = Qwen2ForCausalLM.from_pretrained(model_dir).eval()
    for call in (await run(runner, order(1, [SiblingOrder(0, 0), SiblingOrder(1, 0)]))).values():
        assert mismatch(model, call) < CANARY


async def test_prompts_that_do_not_fit_into_one_step_together_are_sampled_and_repeated(calls: ModelCalls):
    group = order(0, [SiblingOrder(index, 0) for index in range(8)])

    def sampled(sibling: SiblingOrder) -> Coroutine[Any, Any, Completion]:
        prompt = tuple(2 + (7 * sibling.generation_index + 3 * place) % 40 for place in range(1500))
        return calls.complete(group, sibling, prompt, turn=0)

    together = await asyncio.gather(*(sampled(sibling) for sibling in group.siblings))
    assert [(await sampled(sibling)).token_ids for sibling in group.siblings[:2]] == [c.token_ids for c in together[:2]]


async def test_a_part_of_such_a_call_is_never_continued(runner: SiblingRunner, engine: Engine):
    group = order(0, [SiblingOrder(0, 0)])
    (whole,) = (await run(runner, group)).values()
    seed = sampling_seed(CONFIG.seed, prompt_id=0, epoch=0, generation_index=0, turn=0)
    sampling = engine.sampling.call_sampling(seed)
    said: list[RolloutResult] = []
    part = PartialCompletion(
        0,
        prompt_digest(whole["prompt_token_ids"]),
        sampling,
        sampled_tokens(whole["token_ids"][:3], whole["logprobs"][:3], (0,), (0,)),
    )
    result = await runner.run(group, SiblingOrder(0, 0, environment_attempt=1, partial=part), said.append)
    assert result.calls is not None
    assert result.calls.to_pylist()[0]["token_ids"] == whole["token_ids"]
    (discarded,) = said
    assert isinstance(discarded, DiscardedPartial)
    assert "generation.seeding 'engine'" in discarded.reason
