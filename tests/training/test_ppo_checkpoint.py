"""PPO's checkpoints: the critic goes on bit by bit too, and what does not belong together is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gpu_workers.training.trainer_actor import TrainerActor
from gpu_workers.training.weights import weights_sha256
from storage.checkpoints import CheckpointFiles
from storage.errors import FormatUnsupported, RestoreRefused, SnapshotCorrupt
from storage.filesystem import open_store
from storage.run_config import RunConfig

Files = list[dict[str, Any]]

PPO: dict[str, Any] = {
    "kind": "ppo",
    "num_epochs": 2,
    "num_minibatches": 2,
    "kl_coefficient": 0.1,
    "policy_training_start_step": 1,
}
CRITIC_ROLES = {"value_weights", "value_optimizer"}


@pytest.fixture
def make_ppo(make_trainer: Any) -> Callable[..., TrainerActor]:
    return lambda **settings: make_trainer(**{**PPO, **settings})


@pytest.fixture
def trained(make_ppo: Any, make_rows: Any, run_step: Any) -> TrainerActor:
    trainer: TrainerActor = make_ppo()
    for step in (1, 2):
        run_step(trainer, step, make_rows(groups=3, seed=step))
    return trainer


@pytest.fixture
def content(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Hashes of tensors and scalars in a checkpoint's files; the order of a safetensors header is not content."""

    def read(files: Files, roles: set[str] | None = None) -> dict[str, str]:
        found = {}
        for entry in files:
            path = tmp_path / "store" / entry["path"]
            if roles is not None and entry["role"] not in roles:
                continue
            if path.suffix == ".json":
                found[path.name] = entry["sha256"]
            else:
                tensors = load_file(path)
                found |= {f"{path.name} {name}": weights_sha256({name: tensors[name]}) for name in tensors}
        return found

    return read


def test_policy_and_critic_go_on_bit_by_bit_also_in_a_fresh_process(
    trained: TrainerActor,
    make_ppo: Any,
    make_rows: Any,
    run_step: Any,
    start_process: Any,
    config: RunConfig,
    model_dir: Path,
    content: Any,
) -> None:
    files = trained.save("run/checkpoints/step_000002")
    later = {step: make_rows(groups=3, seed=step) for step in (3, 4)}
    configuration = RunConfig.model_validate(
        {**config.model_dump(), "algorithm": {**config.algorithm.model_dump(), **PPO}}
    )
    process = start_process(configuration, model_dir, later, restore=files, save="run/checkpoints/process")
    uninterrupted = [run_step(trained, step, rows).weights_sha256 for step, rows in later.items()]
    expected = content(trained.save("run/checkpoints/step_000004"), CRITIC_ROLES)
    restored = make_ppo()
    run_step(restored, 1, make_rows(groups=2, seed=7))
    restored.restore(files)
    assert [run_step(restored, step, rows).weights_sha256 for step, rows in later.items()] == uninterrupted
    assert content(restored.save("run/checkpoints/restored"), CRITIC_ROLES) == expected
    answer = process()
    assert answer["hashes"] == uninterrupted
    assert content(answer["files"], CRITIC_ROLES) == expected


def test_a_checkpoint_during_the_warm_up_restores(make_ppo: Any, make_rows: Any, run_step: Any, content: Any) -> None:
    first, second = make_ppo(policy_training_start_step=2), make_ppo(policy_training_start_step=2)
    run_step(first, 1, make_rows(groups=2))
    second.restore(first.save("run/checkpoints/step_000001"))
    for step in (2, 3):
        rows = make_rows(groups=3, seed=step)
        assert run_step(first, step, rows).weights_sha256 == run_step(second, step, rows).weights_sha256
    roles = {"weights", *CRITIC_ROLES}  # the policy's scalars hold seconds
    assert content(first.save("run/checkpoints/a"), roles) == content(second.save("run/checkpoints/b"), roles)


def test_restoring_nothing_is_the_initial_critic_too(
    trained: TrainerActor, make_ppo: Any, make_rows: Any, run_step: Any, content: Any
) -> None:
    fresh = make_ppo()
    trained.restore(None)
    assert content(trained.save("run/checkpoints/a")) == content(fresh.save("run/checkpoints/b"))
    rows = make_rows(groups=3)
    assert run_step(trained, 1, rows).weights_sha256 == run_step(fresh, 1, rows).weights_sha256


def test_the_critic_has_files_of_its_own(trained: TrainerActor, tmp_path: Path) -> None:
    files = trained.save("run/checkpoints/step_000002")
    roles = {Path(entry["path"]).name: entry["role"] for entry in files}
    assert roles["critic.safetensors"] == "value_weights"
    assert roles["critic.json"] == "value_optimizer"
    assert [name for name, role in roles.items() if role == "weights"] == ["model.safetensors"]
    folder = tmp_path / "store" / "run/checkpoints/step_000002"
    assert load_file(folder / "critic.safetensors")["value_head.weight"].shape == (1, 32)
    moments = [name for name in roles if name.startswith("critic-shard-")]
    assert moments
    assert "exp_avg.value_head.weight" in load_file(folder / moments[0])


@pytest.mark.parametrize("name", ["critic.safetensors", "critic.json", "critic-shard"])
def test_a_missing_file_of_the_critic_is_refused_by_name(trained: TrainerActor, name: str) -> None:
    files = trained.save("run/checkpoints/step_000002")
    with pytest.raises(SnapshotCorrupt, match=f"lacks .*{name}"):
        trained.restore([entry for entry in files if name not in entry["path"]])


@pytest.mark.parametrize("name", ["critic.safetensors", "critic.json", "critic-shard"])
def test_a_flipped_bit_of_the_critic_is_refused_and_changes_nothing(
    trained: TrainerActor, make_ppo: Any, make_rows: Any, run_step: Any, tmp_path: Path, name: str
) -> None:
    files = trained.save("run/checkpoints/step_000002")
    path = tmp_path / "store" / next(entry["path"] for entry in files if name in entry["path"])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    other = make_ppo()
    with pytest.raises(SnapshotCorrupt, match=f"{path.name}.*sha256"):
        other.restore(files)
    rows = make_rows(groups=2)
    assert run_step(other, 1, rows).weights_sha256 == run_step(make_ppo(), 1, rows).weights_sha256


def test_a_critic_of_another_step_is_refused(trained: TrainerActor, make_rows: Any, run_step: Any) -> None:
    earlier = trained.save("run/checkpoints/step_000002")
    run_step(trained, 3, make_rows(groups=2))
    later = trained.save("run/checkpoints/step_000003")
    mixed = [e for e in later if e["role"] not in CRITIC_ROLES] + [e for e in earlier if e["role"] in CRITIC_ROLES]
    with pytest.raises(SnapshotCorrupt, match=r"critic\.json belongs to step 2"):
        trained.restore(mixed)


def test_an_unknown_format_of_the_critic_is_refused(trained: TrainerActor, tmp_path: Path) -> None:
    files = trained.save("run/checkpoints/step_000002")
    entry = next(entry for entry in files if entry["path"].endswith("critic.json"))
    content = json.loads((tmp_path / "store" / entry["path"]).read_text())
    other = CheckpointFiles(open_store(str(tmp_path / "store")), "run/checkpoints/other")
    new = other.put("critic.json", json.dumps({**content, "surprise": 1}).encode(), entry["role"]).model_dump()
    with pytest.raises(FormatUnsupported, match="surprise"):
        trained.restore([new if each is entry else each for each in files])


def test_grpo_and_ppo_do_not_restore_each_others_checkpoints(trained: TrainerActor, make_trainer: Any) -> None:
    grpo = make_trainer(kl_coefficient=0.1)
    with pytest.raises(RestoreRefused, match=r"holds a critic, but algorithm\.kind is 'grpo'"):
        grpo.restore(trained.save("run/checkpoints/ppo"))
    with pytest.raises(RestoreRefused, match=r"holds no critic, but algorithm\.kind is 'ppo'"):
        trained.restore(grpo.save("run/checkpoints/grpo"))


def test_a_critic_of_another_size_is_refused(
    trained: TrainerActor, make_model: Any, make_ppo: Any, tmp_path: Path
) -> None:
    files = trained.save("run/checkpoints/step_000002")
    with pytest.raises(RestoreRefused, match="policy.model"):
        make_ppo(model=make_model(hidden=48)).restore(files)


def test_another_initial_model_is_refused_while_there_is_a_penalty_towards_it(
    make_model: Any, make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    """Same shapes, other weights: after a restart the penalty would pull somewhere else."""
    model = make_model()
    trainer = make_trainer(model=model, kl_coefficient=0.1)
    run_step(trainer, 1, make_rows(groups=2))
    files = trainer.save("run/checkpoints/step_000001")
    assert [Path(e["path"]).name for e in files if e["role"] == "config"] == ["config.json", "reference.json"]
    trainer.restore(files)
    weights = trainer._policy.tensors()
    save_file({name: value + 0.1 for name, value in weights.items()}, model / "model.safetensors", {"format": "pt"})
    moved = make_trainer(model=model, kl_coefficient=0.1)
    with pytest.raises(RestoreRefused, match="KL penalty towards weights"):
        moved.restore(files)
    make_trainer(model=model).restore(files)
