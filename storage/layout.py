"""Every path in a store is built here and nowhere else. Paths are relative to the store, with `/`."""

import re
from dataclasses import dataclass

_SLOT = re.compile(r"(?P<sequence>[0-9]{8})\.json")
_TRACE = re.compile(r"(?P<process>[^/]+?)(?P<kind>\.jsonl|/[0-9]{8}\.jsonl|\.[0-9]{8}\.parquet|\.compacted\.json)")
_KINDS = {
    "run.json": "run-record",
    "manifests": "manifest",
    "parts": "part",
    "state": "table",
    "checkpoints": "model-file",
    "verifications": "verdict",
    "trace": "trace",
    "owners": "sign-of-life",
}


def run_and_kind(path: str) -> tuple[str, str | None]:
    """The run that a path belongs to, and what kind of file lies there; None for what no run writes."""
    run, _, rest = path.partition("/")
    return run, _KINDS.get(rest.partition("/")[0])


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The paths of one run.

    ```
    <run>/run.json                          name, creation time, identity
    <run>/manifests/00000007.json           the create-only log
    <run>/parts/<sha256>.parquet            training rows and staged calls
    <run>/state/<kind>-<sha256>.parquet     tables of the rollout state (progress: .json)
    <run>/checkpoints/step_000012-<inc>/    weights, optimizer, RNG
    <run>/verifications/00000007.json       what the newest verification of a bundle found
    <run>/trace/<process>.jsonl             events (object stores: <process>/00000001.jsonl ...)
    <run>/trace/<process>.00000000.parquet  the same events, compacted ...
    <run>/trace/<process>.compacted.json    ... which counts once this index is there
    <run>/owners/<writer>.json              sign of life of a controller, while it lives
    ```
    """

    run: str

    @property
    def run_json(self) -> str:
        """The record of the run itself."""
        return f"{self.run}/run.json"

    @property
    def manifests(self) -> str:
        """Folder of the manifest log."""
        return f"{self.run}/manifests"

    @property
    def parts(self) -> str:
        """Folder of the parts."""
        return f"{self.run}/parts"

    @property
    def states(self) -> str:
        """Folder of the state tables."""
        return f"{self.run}/state"

    @property
    def checkpoints(self) -> str:
        """Folder of the trainer checkpoints."""
        return f"{self.run}/checkpoints"

    @property
    def verifications(self) -> str:
        """Folder of the results of verifications."""
        return f"{self.run}/verifications"

    @property
    def traces(self) -> str:
        """Folder of the traces."""
        return f"{self.run}/trace"

    @property
    def owners(self) -> str:
        """Folder of the controllers' signs of life."""
        return f"{self.run}/owners"

    def owner(self, writer: str) -> str:
        """The sign of life of one controller."""
        return f"{self.owners}/{writer}.json"

    def manifest(self, sequence: int) -> str:
        """Slot `sequence` of the manifest log."""
        return f"{self.manifests}/{sequence:08d}.json"

    def sequence_of(self, path: str) -> int | None:
        """The slot number of a path below `manifests` or `verifications`, or None for a file that has none."""
        match = _SLOT.fullmatch(path.rpartition("/")[2])
        return int(match["sequence"]) if match else None

    def verification(self, sequence: int) -> str:
        """The result of the newest verification of bundle `sequence`."""
        return f"{self.verifications}/{sequence:08d}.json"

    def part(self, sha256: str) -> str:
        """A part, named by the hash of its bytes."""
        return f"{self.parts}/{sha256}.parquet"

    def state(self, kind: str, sha256: str) -> str:
        """A state table (Parquet), or the progress counters (JSON), named by the hash of its bytes."""
        suffix = "json" if kind == "progress" else "parquet"
        return f"{self.states}/{kind}-{sha256}.{suffix}"

    def checkpoint(self, step: int, incarnation: str) -> str:
        """Folder of the model files of a trainer checkpoint; each incarnation writes its own."""
        return f"{self.checkpoints}/step_{step:06d}-{incarnation}"

    def trace(self, process: str) -> str:
        """The trace of one process, as one growing file."""
        return f"{self.traces}/{process}.jsonl"

    def trace_segment(self, process: str, number: int) -> str:
        """Segment `number` of a trace in a store that can't append."""
        return f"{self.traces}/{process}/{number:08d}.jsonl"

    def trace_part(self, process: str, number: int) -> str:
        """Part `number` of the compacted trace of one process."""
        return f"{self.traces}/{process}.{number:08d}.parquet"

    def trace_index(self, process: str) -> str:
        """What the compacted trace of one process consists of; written last."""
        return f"{self.traces}/{process}.compacted.json"

    def process_of(self, path: str) -> str | None:
        """The process to which a path below `traces` belongs, or None for a file that is no trace."""
        match = _TRACE.fullmatch(path.removeprefix(f"{self.traces}/"))
        return match["process"] if match else None

    def is_trace_source(self, path: str) -> bool:
        """Whether a path below `traces` was written by the process itself, event by event."""
        return path.endswith(".jsonl")
