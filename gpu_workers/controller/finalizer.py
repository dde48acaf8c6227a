"""Turns a finished group's captured calls into exactly one training row per sibling and publishes them."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from gpu_workers.controller.parts import RolloutParts
from storage.errors import BrokenInvariant
from storage.records import BufferedGroup, LedgerGroup, RowKind, SealedSibling, rollout_id
from storage.rows import RowHandle
from storage.schemas import TRAINING_ROWS, row_digest

NOT_SAMPLED = -1


class Finalizer:
    """Assembles rows off the event loop; publishing, indexing and releasing the ledger entry are one mutation."""

    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts

    async def finalize(self, group_id: str) -> BufferedGroup:
        """Publish a group whose siblings are all sealed. Raises `BrokenInvariant` when its calls can't be joined."""
        parts = self._parts
        async with parts.barrier.mutation("begin_finalize") as mutation:
            group = parts.ledger.begin_finalize(mutation, group_id)
            calls = [parts.rows.rows(_sealed(s.sealed).call_keys) for s in group.siblings]
        rows = await asyncio.to_thread(assemble_rows, group, calls)
        buffered = describe_group(group, rows)
        async with parts.barrier.mutation("publish_group") as mutation:
            parts.rows.remove(mutation, [key for s in group.siblings for key in _sealed(s.sealed).call_keys])
            parts.rows.put(mutation, RowKind.TRAINING_ROW, rows)
            parts.buffer.add(mutation, buffered)
            parts.ledger.release(mutation, group_id)
        self._record(buffered, rows)
        parts.state.changed.notify()
        return buffered

    def _record(self, group: BufferedGroup, rows: pa.RecordBatch) -> None:
        self._parts.trace.record("group_sealed", group_id=group.group_id)
        self._parts.trace.record(
            "group_published",
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            epoch=group.prompt.epoch,
            target_step=group.target_step,
            start_version=group.start_version,
            version_tokens=[list(pair) for pair in group.version_tokens],
            num_tokens=group.num_tokens,
            rewards=list(group.rewards),
            rollout_sha256=digest_of_rows(rows.column("digest").to_pylist()),
        )


def digest_of_rows(digests: Sequence[str]) -> str:
    """sha256 (hex) over row digests in their order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def assemble_rows(group: LedgerGroup, calls: Sequence[Sequence[RowHandle]]) -> pa.RecordBatch:
    """`TRAINING_ROWS` of a group, one per sibling in slot order, from its staged calls."""
    rows = []
    for sibling, handles in zip(group.siblings, calls, strict=True):
        sealed = _sealed(sibling.sealed)
        captured = [handle.batch.slice(handle.index, 1).to_pylist()[0] for handle in handles]
        row = _join_calls(rollout_id(group.group_id, sibling.generation_index), captured)
        row.update(
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            epoch=group.prompt.epoch,
            generation_index=sibling.generation_index,
            attempt=sibling.attempt,
            reward=sealed.reward,
            masked=sealed.masked,
        )
        row["digest"] = row_digest(RowKind.TRAINING_ROW, row)
        rows.append(row)
    return pa.RecordBatch.from_pylist(rows, schema=TRAINING_ROWS)


def describe_group(group: LedgerGroup, rows: pa.RecordBatch) -> BufferedGroup:
    """The replay buffer's record of an assembled group."""
    tokens: dict[int, int] = {}
    columns = (rows.column(name).to_pylist() for name in ("token_ids", "version_starts", "versions"))
    for token_ids, starts, versions in zip(*columns, strict=True):
        for start, end, version in zip(starts, [*starts[1:], len(token_ids)], versions, strict=True):
            if version != NOT_SAMPLED:
                tokens[version] = tokens.get(version, 0) + end - start
    if group.start_version is None:
        raise BrokenInvariant(f"group {group.group_id} is finalized without a start version")
    return BufferedGroup(
        prompt=group.prompt,
        order=group.order,
        target_step=group.target_step,
        start_version=group.start_version,
        row_ids=tuple(rows.column("row_id").to_pylist()),
        rewards=tuple(rows.column("reward").to_pylist()),
        num_tokens=sum(tokens.values()),
        version_tokens=tuple(sorted(tokens.items())),
    )


def _join_calls(row_id: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One sequence from calls whose prompts each extend the sequence so far."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    starts: list[int] = []
    versions: list[int] = []
    for call in calls:
        prompt = call["prompt_token_ids"]
        if prompt[: len(token_ids)] != token_ids:
            raise BrokenInvariant(f"call {call['row_id']} does not continue the tokens of rollout {row_id}")
        added = prompt[len(token_ids) :]
        if added:
            starts.append(len(token_ids))
            versions.append(NOT_SAMPLED)
        token_ids += added + call["token_ids"]
        loss_mask += [False] * len(added) + [True] * len(call["token_ids"])
        logprobs += [0.0] * len(added) + call["logprobs"]
        starts += [len(prompt) + start for start in call["version_starts"]]
        versions += call["versions"]
    return {
        "row_id": row_id,
        "token_ids": token_ids,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "version_starts": starts,
        "versions": versions,
        "finish_reason": calls[-1]["finish_reason"],
    }


def _sealed(sealed: SealedSibling | None) -> SealedSibling:
    if sealed is None:
        raise BrokenInvariant("a group is finalized with an unsealed sibling")
    return sealed
