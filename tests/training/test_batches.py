"""Rows from Arrow to tensors: order, padding, and one clear message for every row that can't be right."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from gpu_workers.training.batches import pad_rows, read_groups, read_rows
from storage.errors import BrokenInvariant
from storage.schemas import TRAINING_ROWS

CPU = torch.device("cpu")


def groups_of(batches: list[pa.RecordBatch]) -> list[list[Any]]:
    return read_groups(batches, group_size=4, vocabulary_size=24)


def test_rows_arrive_with_their_values_and_in_their_order(make_rows: Callable[..., Any]) -> None:
    batches = make_rows(groups=3)
    rows = [row for group in groups_of(batches) for row in group]
    expected = [row for batch in batches for row in batch.to_pylist()]
    assert [row.row_id for row in rows] == [row["row_id"] for row in expected]
    for row, saved in zip(rows, expected, strict=True):
        assert row.token_ids.tolist() == saved["token_ids"]
        assert row.loss_mask.tolist() == saved["loss_mask"]
        assert row.logprobs.tolist() == saved["logprobs"]
        assert row.versions.tolist() == [-1] * 3 + [0] * (len(saved["token_ids"]) - 3)
        assert row.reward == saved["reward"]


def test_batches_may_cut_groups_anywhere_and_may_be_slices(make_rows: Callable[..., Any]) -> None:
    whole = pa.Table.from_batches(make_rows(groups=3)).combine_chunks().to_batches()[0]
    cut = groups_of([whole.slice(0, 3), whole.slice(3, 6), whole.slice(9, 3)])
    for group, expected in zip(cut, groups_of([whole]), strict=True):
        for row, same in zip(group, expected, strict=True):
            assert row.row_id == same.row_id
            assert np.array_equal(row.token_ids, same.token_ids)
            assert np.array_equal(row.logprobs, same.logprobs)


def test_padding_lies_right_of_every_real_token(make_rows: Callable[..., Any]) -> None:
    rows = read_rows(make_rows(groups=2), vocabulary_size=24)
    batch = pad_rows(rows, device=CPU)
    width = max(len(row.token_ids) for row in rows)
    assert tuple(batch.input_ids.shape) == (8, width - 1)
    assert batch.num_predicted == width - 3
    assert batch.targets.tolist() == [token for row in rows for token in row.token_ids[3:].tolist()]
    assert batch.recorded_logprobs.tolist() == [value for row in rows for value in row.logprobs[3:].tolist()]
    assert batch.rows.tolist() == [index for index, row in enumerate(rows) for _ in row.token_ids[3:]]
    assert int(batch.selected.sum()) == len(batch.targets)


def test_environment_tokens_between_sampled_ones_are_context_only(edit_row: Callable[..., Any]) -> None:
    mask = [False, True, False, False, True]
    changed = edit_row(
        token_ids=[1, 2, 3, 4, 5],
        loss_mask=mask,
        logprobs=[0.0, -1.0, 0.0, 0.0, -2.0],
        version_starts=[0, 1, 2, 4],
        versions=[-1, 6, -1, 7],
    )
    row = read_rows([changed], vocabulary_size=24)[1]
    batch = pad_rows([row], device=CPU)
    assert batch.selected.tolist() == [[True, False, False, True]]
    assert batch.targets.tolist() == [2, 5]
    assert batch.versions.tolist() == [6, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [False]}, "unequal length.*loss_mask': 1"),
        ({"logprobs": [0.0]}, "unequal length.*logprobs': 1"),
        ({"token_ids": [1], "loss_mask": [False], "logprobs": [0.0]}, "1 tokens"),
        ({"token_ids": [], "loss_mask": [], "logprobs": []}, "0 tokens"),
        ({"token_ids": [1, 2], "loss_mask": [True, True], "logprobs": [-1.0, -1.0]}, "1 sampled one at its start"),
        ({"token_ids": [1, 24], "loss_mask": [False, True], "logprobs": [0.0, -1.0]}, "the model knows 0 to 23"),
        ({"token_ids": [-1, 2], "loss_mask": [False, True], "logprobs": [0.0, -1.0]}, "token ids -1"),
        (
            {"token_ids": [1, 2], "loss_mask": [False, True], "logprobs": [0.0, float("nan")]},
            "isn't finite",
        ),
        ({"reward": float("inf")}, "isn't finite"),
        ({"version_starts": [0, 3], "versions": [-1]}, "version spans"),
        ({"version_starts": [1, 3]}, "version spans"),
        ({"version_starts": [0, 99]}, "version spans"),
        ({"version_starts": [], "versions": []}, "version spans"),
        ({"generation_index": 2}, r"generation indices \[0, 2, 2, 3\]"),
        ({"group_id": "other"}, r"generation indices \[0\]"),
    ],
)
def test_a_row_that_can_not_be_right_is_refused(
    edit_row: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BrokenInvariant, match=message):
        groups_of([edit_row(**changes)])


def test_no_rows_are_refused() -> None:
    with pytest.raises(BrokenInvariant, match="no rows"):
        groups_of([])
    with pytest.raises(BrokenInvariant, match="no rows"):
        groups_of([pa.RecordBatch.from_pylist([], schema=TRAINING_ROWS)])


def test_another_schema_is_refused_with_its_columns(make_rows: Callable[..., Any]) -> None:
    (batch,) = make_rows(groups=1)
    index = batch.schema.get_field_index("reward")
    other = batch.set_column(index, "reward", batch.column("reward").cast(pa.float64()))
    with pytest.raises(BrokenInvariant, match="differing columns.*reward"):
        groups_of([other])


def test_an_incomplete_group_is_refused(make_rows: Callable[..., Any]) -> None:
    first, second = make_rows(groups=2)
    with pytest.raises(BrokenInvariant, match="e0-p0 arrives with generation indices"):
        groups_of([first.slice(0, 3), second])
