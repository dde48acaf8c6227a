"""From captured calls to training rows: exactly one per sibling. What can't be joined is masked, not guessed."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from storage.errors import BrokenInvariant
from storage.records import BufferedGroup, LedgerGroup, RowKind, SealedSibling, rollout_id
from storage.rows import RowHandle
from storage.schemas import TRAINING_ROWS, row_digest

NOT_SAMPLED = -1


@dataclass(frozen=True, slots=True)
class AssembledGroup:
    """`rows` (`TRAINING_ROWS`): one per sibling, in slot order. `unjoined`: by slot, why its calls make no sequence."""

    rows: pa.RecordBatch
    unjoined: Mapping[int, str]

    @property
    def drop_reason(self) -> str:
        """Why nothing of the group can be trained; empty if something can."""
        if not all(self.rows.column("masked").to_pylist()):
            return ""
        first = next(iter(self.unjoined.values()), "each was masked by its environment")
        return f"none of its {self.rows.num_rows} rollouts can be trained: {first}"


def digest_of_rows(digests: Sequence[str]) -> str:
    """sha256 (hex) over row digests in their order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def assemble_group(group: LedgerGroup, calls: Sequence[Sequence[RowHandle]]) -> AssembledGroup:
    """The rows of a group whose siblings are all sealed, from the staged calls of each."""
    rows: list[dict[str, Any]] = []
    unjoined: dict[int, str] = {}
    for sibling, handles in zip(group.siblings, calls, strict=True):
        sealed = sealed_of(sibling.sealed)
        captured = [handle.batch.slice(handle.index, 1).to_pylist()[0] for handle in handles]
        sequence, problem = _join(captured)
        if problem:
            unjoined[sibling.generation_index] = problem
        row = {
            "row_id": rollout_id(group.group_id, sibling.generation_index),
            "group_id": group.group_id,
            "prompt_id": group.prompt.prompt_id,
            "epoch": group.prompt.epoch,
            "generation_index": sibling.generation_index,
            "attempt": sibling.attempt,
            "reward": sealed.reward,
            "masked": sealed.masked or bool(problem),
            **sequence.columns(),
        }
        row["digest"] = row_digest(RowKind.TRAINING_ROW, row)
        rows.append(row)
    return AssembledGroup(pa.RecordBatch.from_pylist(rows, schema=TRAINING_ROWS), unjoined)


def describe_group(group: LedgerGroup, rows: pa.RecordBatch) -> BufferedGroup:
    """The replay buffer's record of an assembled group. Tokens of masked rows are counted, but have no version: they
    are not trained.
    """
    if group.start_version is None:
        raise BrokenInvariant(f"group {group.group_id} is finalized without a start version")
    sampled, trained = 0, dict[int, int]()
    columns = (rows.column(name).to_pylist() for name in ("token_ids", "version_starts", "versions", "masked"))
    for token_ids, starts, versions, masked in zip(*columns, strict=True):
        for start, end, version in zip(starts, [*starts[1:], len(token_ids)], versions, strict=True):
            if version != NOT_SAMPLED:
                sampled += end - start
                trained[version] = trained.get(version, 0) + (0 if masked else end - start)
    return BufferedGroup(
        prompt=group.prompt,
        order=group.order,
        target_step=group.target_step,
        start_version=group.start_version,
        row_ids=tuple(rows.column("row_id").to_pylist()),
        rewards=tuple(rows.column("reward").to_pylist()),
        num_tokens=sampled,
        version_tokens=tuple(sorted((version, tokens) for version, tokens in trained.items() if tokens)),
    )


def sealed_of(sealed: SealedSibling | None) -> SealedSibling:
    """The result of a sibling that must have one."""
    if sealed is None:
        raise BrokenInvariant("a group is finalized with an unsealed sibling")
    return sealed


@dataclass(slots=True)
class _Sequence:
    """Tokens of one rollout so far, with what is known of each."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Tokens that nobody sampled: the prompt's first, the environment's later."""
        if token_ids:
            self.starts.append(len(self.token_ids))
            self.versions.append(NOT_SAMPLED)
        self.token_ids += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def add_call(self, call: Mapping[str, Any]) -> None:
        """What one call was asked beyond the tokens so far, and what it sampled."""
        self.add_prompt(call["prompt_token_ids"][len(self.token_ids) :])
        self.starts += [len(self.token_ids) + start for start in call["version_starts"]]
        self.versions += call["versions"]
        self.token_ids += call["token_ids"]
        self.loss_mask += [True] * len(call["token_ids"])
        self.logprobs += call["logprobs"]
        self.finish_reason = call["finish_reason"]

    def columns(self) -> dict[str, Any]:
        """As columns of a training row."""
        return {
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "version_starts": self.starts,
            "versions": self.versions,
            "finish_reason": self.finish_reason,
        }


def _join(calls: Sequence[Mapping[str, Any]]) -> tuple[_Sequence, str]:
    """One sequence from calls whose prompts each extend the tokens so far, and why it ends before the last of them.

    Where it ends early, it holds the calls before; at least the first one's prompt, so that the row has a place to be.
    """
    sequence = _Sequence()
    for turn, call in enumerate(calls):
        problem = _breach(sequence, call, turn, previous=calls[turn - 1]["row_id"] if turn else None)
        if problem:
            if turn == 0:
                sequence.add_prompt(call["prompt_token_ids"])
                sequence.finish_reason = call["finish_reason"]
            return sequence, problem
        sequence.add_call(call)
    return sequence, ""


def _breach(sequence: _Sequence, call: Mapping[str, Any], turn: int, *, previous: str | None) -> str:
    """Why a call can't be the next one of a sequence; empty if it can."""
    name, tokens, starts = call["row_id"], len(call["token_ids"]), call["version_starts"]
    if call["turn"] != turn or call["parent_key"] not in (None, previous):
        return f"call {name} is turn {call['turn']} after {call['parent_key']}, expected turn {turn} after {previous}"
    if call["prompt_token_ids"][: len(sequence.token_ids)] != sequence.token_ids:
        return f"call {name} does not continue the tokens before it"
    covers = starts == sorted(set(starts)) and starts[:1] == [0][:tokens] and (not starts or starts[-1] < tokens)
    if len(call["logprobs"]) != tokens or len(call["versions"]) != len(starts) or not covers:
        return (
            f"call {name} was captured incompletely: {tokens} tokens, {len(call['logprobs'])} log-probabilities, "
            f"versions {call['versions']} from {starts}"
        )
    return ""
