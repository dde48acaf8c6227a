"""Exchanging an engine's weights: what stays paused, what is skipped, what errors say."""

import os
from pathlib import Path

import pytest

from gpu_workers.controller.ports import WeightsRef
from gpu_workers.generation.engine_weights import EngineWeights
from storage.errors import InfrastructureFailure


class FakeEngine:
    """The calls of vLLM's AsyncLLM that a refit makes; `refit` reads the file as the worker would."""

    def __init__(self) -> None:
        self.errored = False
        self.paused = False
        self.label = "default"
        self.contents: list[bytes] = []

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", True)
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[int]:
        assert method == "refit"
        assert self.paused
        if self.errored:
            raise RuntimeError("EngineDead")
        content = _content(args[0])
        if not content:
            raise ValueError("does not fit the engine's model")
        self.contents.append(content)
        return [len(content)]

    async def update_weight_version(self, label: str) -> None:
        assert self.paused
        self.label = label


def _content(location: str) -> bytes:
    return Path(location).read_bytes()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def weights(engine: FakeEngine) -> EngineWeights:
    return EngineWeights(engine, "generator 0")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    return path


@pytest.fixture
def unfit(tmp_path: Path) -> Path:
    """A file that the worker refuses."""
    path = tmp_path / "unfit"
    path.write_bytes(b"")
    return path


async def test_a_load_labels_the_weights_and_resumes(weights: EngineWeights, engine: FakeEngine, file: Path):
    timings = await weights.load(WeightsRef(7, str(file)))
    assert (engine.label, engine.paused, weights.version, timings["bytes"]) == ("7", False, 7, 3.0)


async def test_the_same_version_of_the_same_file_is_not_loaded_again(
    weights: EngineWeights, engine: FakeEngine, file: Path
):
    await weights.load(WeightsRef(7, str(file)))
    assert await weights.load(WeightsRef(7, str(file))) == {"pause_s": 0, "load_s": 0, "resume_s": 0, "bytes": 0}
    assert engine.contents == [b"one"]


async def test_a_replaced_file_of_the_same_version_is_loaded(weights: EngineWeights, engine: FakeEngine, file: Path):
    await weights.load(WeightsRef(7, str(file)))
    other = file.with_name("other")
    other.write_bytes(b"two")
    os.replace(other, file)
    await weights.load(WeightsRef(7, str(file)))
    assert engine.contents == [b"one", b"two"]


async def test_another_version_of_the_same_file_is_loaded(weights: EngineWeights, engine: FakeEngine, file: Path):
    await weights.load(WeightsRef(7, str(file)))
    await weights.load(WeightsRef(8, str(file)))
    assert (engine.label, len(engine.contents)) == ("8", 2)


@pytest.mark.parametrize("name", ["missing", "unfit"])
async def test_a_failed_load_leaves_the_engine_paused_and_says_what_to_do(
    weights: EngineWeights, engine: FakeEngine, unfit: Path, name: str
):
    with pytest.raises(InfrastructureFailure, match=r"generator 0 .* version 3 .* engine is paused: load weights"):
        await weights.load(WeightsRef(3, str(unfit.with_name(name))))
    assert engine.paused
    assert weights.version is None


async def test_a_load_after_a_failed_one_resumes_even_with_the_earlier_version(
    weights: EngineWeights, engine: FakeEngine, file: Path, tmp_path: Path
):
    await weights.load(WeightsRef(7, str(file)))
    with pytest.raises(InfrastructureFailure):
        await weights.load(WeightsRef(8, str(tmp_path / "missing")))
    await weights.load(WeightsRef(7, str(file)))
    assert not engine.paused
    assert len(engine.contents) == 2


async def test_a_dead_engine_asks_for_another_generator(weights: EngineWeights, engine: FakeEngine, file: Path):
    engine.errored = True
    with pytest.raises(InfrastructureFailure, match="its engine is dead: start the generator again"):
        await weights.load(WeightsRef(3, str(file)))
