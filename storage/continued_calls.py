"""What was saved of a running model call against what later bundles hold of it: the same tokens, of the same attempt.

A call goes on with the tokens that it had, each with its log-probability and the weight version that sampled it. Later
bundles hold it as a longer partial call, as the staged call that it became, or within a training row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.audit_findings import Needs, Suspicion
from storage.history import Segment
from storage.records import PartialCall, RowKind
from storage.rows import RowHandle
from storage.snapshot_reader import RestoredBundle
from storage.trace_index import TraceIndex

_OTHERWISE = "model calls that do not go on with the tokens that were saved"


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Tokens of a call, with the log-probability and the weight version of each."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]

    def begins_with(self, other: "_Sampled") -> bool:
        """Whether the other one's are the first of these."""
        length = len(other.token_ids)
        return all(
            np.array_equal(getattr(self, name)[:length], getattr(other, name))
            for name in ("token_ids", "logprobs", "versions")
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    """A partial call of a bundle that `writer` cut at `cut_time`."""

    writer: str
    cut_time: float
    call: PartialCall
    sampled: _Sampled


class ContinuedCalls:
    """Goes through the bundles of a run, oldest first."""

    def __init__(self) -> None:
        self._saved: list[_Saved] = []
        self._compared: set[str] = set()

    @property
    def compared(self) -> int:
        """Saved calls that a later bundle holds more of."""
        return len(self._compared)

    def suspicions(self, bundle: RestoredBundle, segments: Sequence[Segment], trace: TraceIndex) -> Iterator[Suspicion]:
        """Calls of this bundle that began otherwise in one that it stands on. `segments`: its writer up to the cut, and
        what that stands on; `trace`: their events.
        """
        rows_of = {call.key: _of_chunks(call, bundle) for call in bundle.state.partial_calls}
        for saved in self._saved:
            if not _leads_to(saved, segments) or _was_discarded(saved.call, trace):
                continue
            found = rows_of.get(saved.call.key) or _of_result(saved.call, bundle)
            if found is None:
                continue
            self._compared.add(saved.call.key)
            if not found.begins_with(saved.sampled):
                yield Suspicion(_OTHERWISE, saved.call.key, Needs.BELOW)
        if segments:
            here = segments[0]
            self._saved += [
                _Saved(here.life.run_process, here.cut_time, call, rows_of[call.key])
                for call in bundle.state.partial_calls
            ]


def _leads_to(saved: _Saved, segments: Sequence[Segment]) -> bool:
    return any(segment.life.run_process == saved.writer and saved.cut_time <= segment.cut_time for segment in segments)


def _was_discarded(call: PartialCall, trace: TraceIndex) -> bool:
    """A generator could not go on from them and said so: the call was sampled anew."""
    discarded = trace.of(call.rollout_id, "prefix_discarded")
    return any(int(event["attempt"]) == call.attempt for event in discarded)


def _of_chunks(call: PartialCall, bundle: RestoredBundle) -> _Sampled:
    parts = [_of_row(bundle.rows[chunk]) for chunk in call.chunks]
    return _Sampled(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.versions for part in parts]),
    )


def _of_result(call: PartialCall, bundle: RestoredBundle) -> _Sampled | None:
    """The call once it has ended. Within a training row only a first call is found: others follow tokens of theirs."""
    if (staged := bundle.rows.get(call.key)) is not None:
        return _of_row(staged)
    row = bundle.rows.get(call.rollout_id)
    if row is None or row.kind is not RowKind.TRAINING_ROW or call.turn:
        return None
    if row.batch.column("attempt")[row.index].as_py() != call.attempt:
        return None
    whole = _of_row(row)
    start = call.prompt_tokens
    return _Sampled(whole.token_ids[start:], whole.logprobs[start:], whole.versions[start:])


def _of_row(row: RowHandle) -> _Sampled:
    """What a row of any kind holds in its columns of tokens."""
    values = {
        name: row.batch.column(name)[row.index].values.to_numpy(zero_copy_only=False)
        for name in ("token_ids", "logprobs", "version_starts", "versions")
    }
    lengths = np.diff(values["version_starts"], append=len(values["token_ids"]))
    return _Sampled(values["token_ids"], values["logprobs"], np.repeat(values["versions"].astype(np.int64), lengths))
