"""A restored trainer goes on exactly as one that was never stopped, or says what is wrong with its files."""

import json
import pickletools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_safetensors
from transformers import AutoModelForCausalLM

from gpu_workers.training.trainer_actor import TrainerActor
from storage.checkpoints import CheckpointFiles
from storage.errors import (
    BrokenInvariant,
    FormatUnsupported,
    MidflightError,
    RestoreRefused,
    SnapshotCorrupt,
    StoreUnavailable,
)
from storage.filesystem import open_store

Files = list[dict[str, Any]]


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def rewrite(store_dir: Path) -> Callable[..., Files]:
    """Replace a file's content and its entry: what the manifest lists is intact, what it means is not."""

    def rewritten(files: Files, name: str, data: bytes) -> Files:
        entry = next(entry for entry in files if entry["path"].endswith(name))
        prefix, _, base = entry["path"].rpartition("/")
        new = CheckpointFiles(open_store(str(store_dir)), f"{prefix}-other").put(base, data, entry["role"])
        return [
            new.model_dump(include={"path", "bytes", "sha256", "role"}) if each is entry else each for each in files
        ]

    return rewritten


@pytest.fixture
def trained(make_trainer: Any, make_rows: Any, run_step: Any) -> TrainerActor:
    trainer: TrainerActor = make_trainer()
    for step in (1, 2):
        run_step(trainer, step, make_rows(groups=3, seed=step))
    return trainer


def test_a_restored_trainer_goes_on_bit_by_bit_also_in_a_fresh_process(
    trained: TrainerActor,
    make_trainer: Any,
    make_rows: Any,
    run_step: Any,
    start_process: Any,
    config: Any,
    model_dir: Path,
) -> None:
    files = trained.save("run/checkpoints/step_000002")
    later = {step: make_rows(groups=3, seed=step) for step in (3, 4)}
    process = start_process(config, model_dir, later, restore=files)
    uninterrupted = [run_step(trained, step, rows).weights_sha256 for step, rows in later.items()]
    restored = make_trainer()
    run_step(restored, 1, make_rows(groups=2, seed=7))
    restored.restore(files)
    assert [run_step(restored, step, rows).weights_sha256 for step, rows in later.items()] == uninterrupted
    assert process()["hashes"] == uninterrupted


def _written(trainer: TrainerActor, prefix: str) -> Files:
    """The files of a save in the background, as soon as there are any."""
    deadline = time.monotonic() + 60
    while (files := trainer.saved_files(prefix)) is None:
        assert time.monotonic() < deadline, "the save never ended"
        time.sleep(0.01)
    return files


def test_a_checkpoint_written_in_the_background_is_that_of_the_moment_it_was_begun(
    trained: TrainerActor, make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    result = trained.finish_step(2)
    trained.begin_save("run/checkpoints/step_000002")
    third = run_step(trained, 3, make_rows(groups=3, seed=3))
    files = _written(trained, "run/checkpoints/step_000002")
    restored = make_trainer()
    restored.restore(files)
    assert restored.finish_step(2) == result
    assert run_step(restored, 3, make_rows(groups=3, seed=3)).weights_sha256 == third.weights_sha256


def test_what_a_save_in_the_background_failed_with_is_raised_and_the_next_one_can_succeed(
    trained: TrainerActor, store_dir: Path
) -> None:
    store_dir.mkdir(parents=True, exist_ok=True)
    (store_dir / "blocked").write_text("a file where a folder would have to be")
    trained.begin_save("blocked/step_000002")
    with pytest.raises(StoreUnavailable, match="blocked"):
        _written(trained, "blocked/step_000002")
    with pytest.raises(BrokenInvariant, match="asked for the files below run/checkpoints/a, but saved below blocked"):
        trained.saved_files("run/checkpoints/a")
    trained.begin_save("run/checkpoints/a")
    assert _written(trained, "run/checkpoints/a")


def test_a_restored_trainer_knows_its_last_step_and_forgets_an_open_one(
    trained: TrainerActor, make_trainer: Any, make_rows: Any
) -> None:
    files, result = trained.save("run/checkpoints/step_000002"), trained.finish_step(2)
    other = make_trainer()
    other.begin_step(1)
    other.train_microbatch(make_rows(groups=2))
    other.restore(files)
    assert other.finish_step(2) == result
    assert other.ready()["step"] == 2


def test_restoring_nothing_is_the_initial_model_bit_by_bit(
    trained: TrainerActor, make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    trained.restore(None)
    rows = make_rows(groups=3)
    assert run_step(trained, 1, rows).weights_sha256 == run_step(make_trainer(), 1, rows).weights_sha256


def test_the_random_state_is_part_of_a_checkpoint(trained: TrainerActor, make_trainer: Any) -> None:
    torch.rand(3)
    files = trained.save("run/checkpoints/step_000002")
    expected = torch.rand(4)
    make_trainer().restore(files)
    assert torch.equal(torch.rand(4), expected)


def test_a_checkpoint_before_the_first_step_restores(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    fresh = make_trainer()
    files = fresh.save("run/checkpoints/step_000000")
    other = make_trainer()
    run_step(other, 1, make_rows(groups=2, seed=4))
    other.restore(files)
    rows = make_rows(groups=3)
    assert run_step(other, 1, rows).weights_sha256 == run_step(fresh, 1, rows).weights_sha256


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_a_checkpoint_load_as_a_hugging_face_model(
    make_model: Any, make_trainer: Any, make_rows: Any, run_step: Any, store_dir: Path, tied: bool
) -> None:
    trainer = make_trainer(model=make_model(tied=tied))
    run_step(trainer, 1, make_rows(groups=2))
    trainer.save("run/checkpoints/step_000001")
    loaded = AutoModelForCausalLM.from_pretrained(store_dir / "run/checkpoints/step_000001", dtype=torch.float32)
    own = trainer._policy.tensors()
    assert dict(loaded.named_parameters()).keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in loaded.named_parameters())


def test_no_file_of_a_checkpoint_is_a_pickle(trained: TrainerActor, store_dir: Path) -> None:
    files = trained.save("run/checkpoints/step_000002")
    written = sorted(path for path in store_dir.rglob("*") if path.is_file())
    assert {str(path.relative_to(store_dir)) for path in written} == {entry["path"] for entry in files}
    for path in written:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)
        with pytest.raises(ValueError, match=r".*"):
            list(pickletools.genops(path.read_bytes()))


def test_what_is_saved_does_not_change_while_it_is_written(
    trained: TrainerActor, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained.finish_step(2).weights_sha256
    put = CheckpointFiles.put

    def put_and_disturb(self: CheckpointFiles, name: str, data: bytes, role: str) -> Any:
        with torch.no_grad():
            for value in trained._policy.parameters().values():
                value.add_(1.0)
        return put(self, name, data, role)

    monkeypatch.setattr(CheckpointFiles, "put", put_and_disturb)
    files = trained.save("run/checkpoints/step_000002")
    other = make_trainer()
    other.restore(files)
    assert other.finish_step(2).weights_sha256 == expected


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "trainer.json", "00001.safetensors"])
def test_a_flipped_bit_is_refused_and_changes_nothing(
    trained: TrainerActor, make_trainer: Any, make_rows: Any, run_step: Any, store_dir: Path, name: str
) -> None:
    files = trained.save("run/checkpoints/step_000002")
    path = store_dir / next(entry["path"] for entry in files if entry["path"].endswith(name))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    other = make_trainer()
    with pytest.raises(SnapshotCorrupt, match=f"{path.name}.*sha256"):
        other.restore(files)
    rows = make_rows(groups=2)
    assert run_step(other, 1, rows).weights_sha256 == run_step(make_trainer(), 1, rows).weights_sha256


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "lacks model.safetensors"),
        ("trainer.json", "lacks trainer.json"),
        ("00001.safetensors", "lacks the optimizer state"),
    ],
)
def test_a_missing_file_is_refused_by_name(trained: TrainerActor, name: str, message: str) -> None:
    files = trained.save("run/checkpoints/step_000002")
    with pytest.raises(SnapshotCorrupt, match=message):
        trained.restore([entry for entry in files if not entry["path"].endswith(name)])
    with pytest.raises(SnapshotCorrupt, match="lacks"):
        trained.restore([])


def test_a_missing_moment_is_refused_by_name(trained: TrainerActor, store_dir: Path, rewrite: Any) -> None:
    files = trained.save("run/checkpoints/step_000002")
    shard = next(entry["path"] for entry in files if entry["path"].endswith("00001.safetensors"))
    tensors = load_file(store_dir / shard)
    del tensors["exp_avg.model.norm.weight"]
    with pytest.raises(SnapshotCorrupt, match=r"holds nothing for exp_avg\.model\.norm\.weight"):
        trained.restore(rewrite(files, "00001.safetensors", save_safetensors(tensors)))


def test_weights_of_another_step_are_refused(trained: TrainerActor, make_rows: Any, run_step: Any) -> None:
    earlier = trained.save("run/checkpoints/step_000002")
    run_step(trained, 3, make_rows(groups=2))
    later = trained.save("run/checkpoints/step_000003")
    mixed = [entry for entry in later if entry["role"] != "weights"]
    mixed += [entry for entry in earlier if entry["role"] == "weights"]
    with pytest.raises(SnapshotCorrupt, match=r"trainer\.json belongs to weights"):
        trained.restore(mixed)


def test_an_unknown_format_is_refused(trained: TrainerActor, store_dir: Path, rewrite: Any) -> None:
    files = trained.save("run/checkpoints/step_000002")
    path = next(entry["path"] for entry in files if entry["path"].endswith("trainer.json"))
    scalars = json.loads((store_dir / path).read_text())
    for changed, message in (
        ({**scalars, "format_version": 9}, "format_version is 9"),
        ({**scalars, "surprise": 1}, "surprise"),
    ):
        with pytest.raises(FormatUnsupported, match=message):
            trained.restore(rewrite(files, "trainer.json", json.dumps(changed).encode()))


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.json", "00001.safetensors"])
def test_a_file_that_is_not_what_its_name_says_is_refused(trained: TrainerActor, rewrite: Any, name: str) -> None:
    files = trained.save("run/checkpoints/step_000002")
    with pytest.raises(SnapshotCorrupt, match=name):
        trained.restore(rewrite(files, name, b"not at all"))


def test_weights_of_another_model_are_refused_with_both_shapes(
    trained: TrainerActor, make_model: Any, make_trainer: Any
) -> None:
    files = trained.save("run/checkpoints/step_000002")
    other = make_trainer(model=make_model(hidden=48))
    with pytest.raises(RestoreRefused, match=r"saved \(24, 32\) float32, expected \(24, 48\)") as refused:
        other.restore(files)
    assert isinstance(refused.value, MidflightError)
    untied = make_trainer(model=make_model(tied=False))
    with pytest.raises(RestoreRefused, match=r"lm_head\.weight: saved absent"):
        untied.restore(files)
