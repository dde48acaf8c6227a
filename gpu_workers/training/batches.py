"""From Arrow rows to padded tensors: checks every row, keeps the order, never mixes tokens of two rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from storage.errors import BrokenInvariant
from storage.schemas import TRAINING_ROWS

TRUNCATED = "length"


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One sequence: arrays of one length over all its tokens; `versions` is -1 where nothing was sampled."""

    row_id: str
    group_id: str
    generation_index: int
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reward: float
    masked: bool
    finish_reason: str

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask.sum())

    @property
    def is_truncated(self) -> bool:
        """Whether the completion was cut off at its token limit."""
        return self.finish_reason == TRUNCATED


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Right-padded rows for one forward pass. R rows, W the longest length, T the trained tokens, row by row.

    `input_ids` int64 [R, W - 1] (the last token predicts nothing); `num_predicted` K: logits are needed for the last
    K positions only; `selected` bool [R, K] marks the positions whose next token was sampled. The next ones have
    shape [T]: `targets` int64, `recorded_logprobs` float32 in nats, `versions` int64, `rows` int64 (index of the row).

    No attention mask is needed: attention is causal and the padding lies to the right of every real token.
    """

    input_ids: Tensor
    num_predicted: int
    selected: Tensor
    targets: Tensor
    recorded_logprobs: Tensor
    versions: Tensor
    rows: Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.input_ids.shape[0])


def read_groups(batches: Sequence[pa.RecordBatch], *, group_size: int, vocabulary_size: int) -> list[list[TrainingRow]]:
    """Whole groups in their order, each with its `group_size` rows in slot order; batches may cut them anywhere.

    Raises: BrokenInvariant naming the row or group for another schema, an empty sequence, columns of unequal length,
    token ids outside the vocabulary, values that aren't finite, and groups that aren't whole or not in order.
    """
    rows = read_rows(batches, vocabulary_size=vocabulary_size)
    groups = [list(members) for _, members in groupby(rows, key=lambda row: row.group_id)]
    for group in groups:
        slots = [row.generation_index for row in group]
        if slots != list(range(group_size)):
            raise BrokenInvariant(
                f"group {group[0].group_id} arrives with generation indices {slots}, expected 0 to {group_size - 1} "
                "in this order; send whole groups, one after the other"
            )
    return groups


def read_rows(batches: Sequence[pa.RecordBatch], *, vocabulary_size: int) -> list[TrainingRow]:
    """All rows, checked one by one, in their order. Raises: as `read_groups`, but for the groups."""
    rows = [row for batch in batches for row in _read_batch(batch, vocabulary_size)]
    if not rows:
        raise BrokenInvariant("a microbatch holds no rows; send at least one whole group")
    return rows


def _read_batch(batch: pa.RecordBatch, vocabulary_size: int) -> Iterator[TrainingRow]:
    if not batch.schema.equals(TRAINING_ROWS):
        names = [field.name for field in batch.schema if field not in list(TRAINING_ROWS)]
        raise BrokenInvariant(f"rows do not have the schema storage.schemas.TRAINING_ROWS; differing columns: {names}")
    plain = ("row_id", "group_id", "generation_index", "reward", "masked", "finish_reason")
    ragged = ("token_ids", "loss_mask", "logprobs", "version_starts", "versions")
    columns = [batch.column(name).to_pylist() for name in plain]
    arrays = [_ragged(batch.column(name)) for name in ragged]
    for scalars, (token_ids, loss_mask, logprobs, starts, versions) in zip(
        zip(*columns, strict=True), zip(*arrays, strict=True), strict=True
    ):
        row_id, group_id, generation_index, *outcome = scalars
        _check(row_id, token_ids, loss_mask, logprobs, outcome[0], vocabulary_size)
        spans = _expand(row_id, starts, versions, len(token_ids))
        yield TrainingRow(row_id, group_id, generation_index, token_ids, loss_mask, logprobs, spans, *outcome)


def _ragged(column: Any) -> Iterator[NDArray[Any]]:
    """The lists of an Arrow list column as arrays, from one copy of its values."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    return iter(np.split(values, np.cumsum(column.value_lengths().to_numpy())[:-1])) if len(column) else iter(())


def _check(
    row_id: str,
    token_ids: NDArray[np.int32],
    loss_mask: NDArray[np.bool_],
    logprobs: NDArray[np.float32],
    reward: float,
    vocabulary_size: int,
) -> None:
    lengths = {"token_ids": len(token_ids), "loss_mask": len(loss_mask), "logprobs": len(logprobs)}
    if len(set(lengths.values())) != 1:
        raise BrokenInvariant(f"row {row_id} has columns of unequal length: {lengths}")
    if len(token_ids) < 2 or loss_mask[0]:
        raise BrokenInvariant(
            f"row {row_id} has {len(token_ids)} tokens, {int(loss_mask[:1].sum())} sampled one at its start; "
            "a row needs at least two tokens and a prompt before what is sampled"
        )
    if token_ids.min() < 0 or token_ids.max() >= vocabulary_size:
        raise BrokenInvariant(
            f"row {row_id} holds token ids {token_ids.min()} to {token_ids.max()}, "
            f"the model knows 0 to {vocabulary_size - 1}"
        )
    if not np.isfinite(reward) or not np.isfinite(logprobs).all():
        raise BrokenInvariant(f"row {row_id} holds a reward ({reward}) or log-probability that isn't finite")


def _expand(row_id: str, starts: NDArray[np.int32], versions: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """Version spans as one version per token."""
    counts = np.diff(starts, append=length)
    if len(starts) != len(versions) or not len(starts) or starts[0] != 0 or (counts <= 0).any():
        raise BrokenInvariant(
            f"row {row_id} has version spans that do not cover its {length} tokens: starts {starts.tolist()}, "
            f"versions {versions.tolist()}"
        )
    return np.repeat(versions, counts)


def pad_rows(rows: Sequence[TrainingRow], *, device: torch.device) -> TokenBatch:
    """Tensors of rows that all have sampled tokens, in the order given; padding is token 0."""
    width = max(len(row.token_ids) for row in rows)
    first = min(int(row.loss_mask.argmax()) for row in rows)
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    sampled = np.zeros((len(rows), width), dtype=np.bool_)
    for index, row in enumerate(rows):
        token_ids[index, : len(row.token_ids)] = row.token_ids
        sampled[index, : len(row.loss_mask)] = row.loss_mask
    recorded = np.concatenate([row.logprobs[row.loss_mask] for row in rows])
    versions = np.concatenate([row.versions[row.loss_mask] for row in rows])
    owners = np.repeat(np.arange(len(rows)), sampled.sum(axis=1))
    return TokenBatch(
        input_ids=torch.from_numpy(token_ids[:, :-1]).to(device),
        num_predicted=width - first,
        selected=torch.from_numpy(sampled[:, first:]).to(device),
        targets=torch.from_numpy(token_ids[sampled]).to(device),
        recorded_logprobs=torch.from_numpy(recorded).to(device),
        versions=torch.from_numpy(versions.astype(np.int64)).to(device),
        rows=torch.from_numpy(owners).to(device),
    )


def pad_whole_rows(rows: Sequence[TrainingRow], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """(token ids int64 [R, W], index of each row's last token int64 [R]); right-padded with token 0."""
    lengths = [len(row.token_ids) for row in rows]
    token_ids = np.zeros((len(rows), max(lengths)), dtype=np.int64)
    for index, row in enumerate(rows):
        token_ids[index, : len(row.token_ids)] = row.token_ids
    return torch.from_numpy(token_ids).to(device), torch.tensor(lengths, device=device) - 1
