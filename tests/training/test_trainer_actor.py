"""The trainer's verbs: numbered steps, published weights, what it says about itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gpu_workers.training.ranks import join_ranks
from gpu_workers.training.weights import HASHED_BYTES, weights_sha256
from storage.errors import ConfigurationError, StepOutOfOrder


def test_a_finished_step_returns_its_result_again(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    trainer = make_trainer()
    result = run_step(trainer, 1, make_rows(groups=2))
    assert trainer.finish_step(1) == result
    with pytest.raises(StepOutOfOrder, match="step 1 is finished already"):
        trainer.begin_step(1)
    assert trainer.finish_step(1) == result


def test_steps_come_in_order_and_are_finished_under_their_own_number(make_trainer: Any, make_rows: Any) -> None:
    trainer = make_trainer()
    with pytest.raises(StepOutOfOrder, match="step 2 can't begin: the trainer has finished step 0"):
        trainer.begin_step(2)
    with pytest.raises(StepOutOfOrder, match="no step is open"):
        trainer.train_microbatch(make_rows(groups=1))
    with pytest.raises(StepOutOfOrder, match="no step is open"):
        trainer.finish_step(1)
    trainer.begin_step(1)
    for other in (0, 2):
        with pytest.raises(StepOutOfOrder, match=f"step {other} can't be finished: the open step is 1"):
            trainer.finish_step(other)


def test_equal_rows_give_equal_weights_and_others_do_not(make_trainer: Any, make_rows: Any, run_step: Any) -> None:
    first = run_step(make_trainer(), 1, make_rows(groups=3))
    assert run_step(make_trainer(), 1, make_rows(groups=3)).weights_sha256 == first.weights_sha256
    assert run_step(make_trainer(), 1, make_rows(groups=3, seed=1)).weights_sha256 != first.weights_sha256


@pytest.mark.parametrize("tied", [True, False])
def test_published_weights_are_a_hugging_face_file_of_the_current_policy(
    make_model: Any, make_trainer: Any, make_rows: Any, run_step: Any, tied: bool
) -> None:
    model_dir = make_model(tied=tied)
    trainer = make_trainer(model=model_dir)
    result = run_step(trainer, 1, make_rows(groups=2))
    reference = trainer.publish_weights(1)
    assert reference.version == 1
    published = load_file(reference.location)
    assert weights_sha256(published) == result.weights_sha256
    assert ("lm_head.weight" in published) == (not tied)
    assert published.keys() == load_file(model_dir / "model.safetensors").keys()
    assert [path.name for path in Path(reference.location).parent.iterdir()] == ["model.safetensors"]


def test_the_newest_two_versions_remain_also_after_going_back(make_trainer: Any) -> None:
    trainer = make_trainer()
    for version in range(5):
        location = Path(trainer.publish_weights(version).location)
    folder = location.parent.parent

    def names() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    assert names() == ["version-000003", "version-000004"]
    trainer.publish_weights(2)
    assert names() == ["version-000002"]
    trainer.publish_weights(2)
    trainer.publish_weights(3)
    assert names() == ["version-000002", "version-000003"]


def test_the_hash_covers_names_and_bytes_and_stops_at_large_models() -> None:
    tensors = {"b": torch.arange(4.0), "a": torch.zeros(2)}
    assert weights_sha256(tensors) == weights_sha256({"a": torch.zeros(2), "b": torch.arange(4.0)})
    assert weights_sha256(tensors) != weights_sha256({"c": torch.zeros(2), "b": torch.arange(4.0)})
    assert weights_sha256(tensors) != weights_sha256({"a": torch.ones(2), "b": torch.arange(4.0)})
    large = torch.empty(HASHED_BYTES // 4 + 1, device="meta")
    assert weights_sha256({"large": large}) == ""


def test_bfloat16_is_what_generators_get_while_training_stays_in_float32(
    make_trainer: Any, make_rows: Any, run_step: Any
) -> None:
    trainer = make_trainer(sections={"policy": {"dtype": "bfloat16"}})
    run_step(trainer, 1, make_rows(groups=2))
    published = load_file(trainer.publish_weights(1).location)
    assert {value.dtype for value in published.values()} == {torch.bfloat16}
    assert {value.dtype for value in trainer._policy.tensors().values()} == {torch.float32}


def test_a_trainer_says_who_and_where_it_is(make_trainer: Any) -> None:
    ready = make_trainer().ready()
    assert ready["rank"] == 0
    assert ready["step"] == 0
    assert ready["device"] == "cpu"
    assert ready["num_parameters"] > 0
    assert torch.get_num_threads() == 1


def test_a_folder_without_a_model_is_refused(make_trainer: Any, tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        make_trainer(model=tmp_path)
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(ConfigurationError, match="can't be loaded"):
        make_trainer(model=tmp_path)


def test_several_ranks_need_a_rendezvous() -> None:
    with pytest.raises(ConfigurationError, match="rendezvous"):
        join_ranks(0, 2, rendezvous=None, device=torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="rank 2 of 2"):
        join_ranks(2, 2, rendezvous="file:///nowhere", device=torch.device("cpu"))


def test_the_model_of_the_folder_is_what_training_starts_from(make_trainer: Any, model_dir: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    own = make_trainer()._policy.tensors()
    assert all(torch.equal(value, own[name]) for name, value in loaded.named_parameters())
