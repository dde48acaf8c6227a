"""The manifest log of a run: numbered slots, created once, never changed; a lost slot means *fenced*.

A slot's file is one line of JSON, `{"manifest":{...},"sha256":"..."}` in canonical spelling, so that every
changed bit of it is found.
"""

import json
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from storage.canonical import canonical_json, sha256
from storage.errors import (
    AlreadyExists,
    BrokenInvariant,
    Fenced,
    FormatUnsupported,
    NotFound,
    SnapshotCorrupt,
    StoreOutcomeUnknown,
    StoreUnavailable,
)
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.refusals import corrupt, unsupported

FORMAT_VERSION = 1
_CLAIM_ATTEMPTS = 100
_READERS = 8

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
ManifestKind = Literal["claim", "trainer_checkpoint", "rollout_snapshot", "retired"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileEntry(_Record):
    """One file of a bundle. `path` is relative to the store; parts and tables state `rows` and a version."""

    path: str
    bytes: Count
    sha256: Sha256
    role: str = Field(description="part | state | weights | optimizer | config | ...")
    kind: str | None = None
    rows: Count | None = None
    schema_version: int | None = None

    @field_validator("path")
    @classmethod
    def _stays_in_the_store(cls, path: str) -> str:
        if not re.fullmatch(r"[^/\\\0]+(/[^/\\\0]+)*", path) or {".", ".."} & set(path.split("/")):
            raise ValueError(f"{path!r} is not a relative path inside the store")
        return path


class Anchor(_Record):
    """The trainer state that a rollout snapshot belongs to: a published checkpoint, or the initial model."""

    kind: Literal["bootstrap", "checkpoint"]
    step: Count
    sequence: Count | None
    identity: str

    @classmethod
    def bootstrap(cls, identity: str) -> "Anchor":
        """The initial model of a run with this identity (fingerprint)."""
        return cls(kind="bootstrap", step=0, sequence=None, identity=identity)

    @classmethod
    def at(cls, checkpoint: "Manifest") -> "Anchor":
        """A published trainer checkpoint."""
        return cls(
            kind="checkpoint",
            step=checkpoint.step,
            sequence=checkpoint.sequence,
            identity=checkpoint.identity,
        )


class ManifestDraft(_Record):
    """What a writer wants to publish; the log adds sequence, run, writer and time."""

    kind: ManifestKind
    step: Count = 0
    anchor: Anchor | None = None
    cut_time: Finite | None = Field(None, description="Wall-clock time of the cut, in Unix seconds.")
    files: tuple[FileEntry, ...] = ()
    counts: dict[str, int] = Field(default_factory=dict)
    logical_digest: str | None = None
    identity: str = ""
    config: dict[str, Any] = Field(default_factory=dict)
    dataset_fingerprint: str | None = None
    retires: tuple[int, ...] = ()


class Manifest(ManifestDraft):
    """A published slot. `created_at` is in Unix seconds; `writer` is the token of its controller."""

    format_version: Literal[1]
    sequence: Count
    run: str
    writer: str
    created_at: Finite


@dataclass(frozen=True, slots=True)
class BrokenSlot:
    """A slot that can't be read; `reason` says why. It is never skipped in silence."""

    sequence: int
    reason: str


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a slot."""
    body = manifest.model_dump(mode="json")
    return canonical_json({"manifest": body, "sha256": sha256(canonical_json(body))}) + b"\n"


def decode_manifest(data: bytes, path: str) -> Manifest:
    """The manifest in a slot's bytes.

    Raises: FormatUnsupported for another version or an unknown field; SnapshotCorrupt for anything else.
    """
    try:
        envelope = json.loads(data)
        body, stated = envelope["manifest"], envelope["sha256"]
        version = body["format_version"]
        actual = sha256(canonical_json(body))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise corrupt(path, f"not a manifest ({error!r})") from error
    if stated != actual:
        raise corrupt(path, f"states sha256 {stated}, its content has {actual}")
    if version != FORMAT_VERSION:
        raise unsupported(path, f"format_version is {version!r}, this Midflight reads {FORMAT_VERSION}")
    try:
        manifest = Manifest.model_validate_json(canonical_json(body))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        if any(e["type"] == "extra_forbidden" for e in error.errors()):
            raise unsupported(path, problems) from error
        raise corrupt(path, problems) from error
    if encode_manifest(manifest) != data:
        raise corrupt(path, "not in canonical spelling, it was changed")
    return manifest


def read_log(store: Store, layout: RunLayout) -> tuple[Manifest | BrokenSlot, ...]:
    """Every slot from 0 to the newest, in order. Reads all of them anew; writes nothing.

    Raises: StoreUnavailable when a slot could not be read at all.
    """
    return _refuse_stale(layout, _read_slots(store, layout, range(_last_slot(store, layout) + 1)))


def _refuse_stale(layout: RunLayout, slots: Sequence[Manifest | BrokenSlot]) -> tuple[Manifest | BrokenSlot, ...]:
    """A writer that lost the run publishes nothing more, unless it claims it again. A store with exclusive creation
    holds no such slot; one that was copied or edited may.
    """
    checked: list[Manifest | BrokenSlot] = []
    holder, earlier = "", set[str]()
    for slot in slots:
        if isinstance(slot, Manifest) and slot.writer != holder:
            if slot.writer in earlier and slot.kind != "claim":
                reason = f"{layout.manifest(slot.sequence)}: by {slot.writer!r}, which had lost the run to {holder!r}"
                checked.append(BrokenSlot(slot.sequence, reason))
                continue
            holder = slot.writer
            earlier.add(holder)
        checked.append(slot)
    return tuple(checked)


def _last_slot(store: Store, layout: RunLayout) -> int:
    slots = (layout.sequence_of(path) for path in store.list(layout.manifests))
    return max((slot for slot in slots if slot is not None), default=-1)


def _read_slots(store: Store, layout: RunLayout, slots: Sequence[int]) -> tuple[Manifest | BrokenSlot, ...]:
    def read(slot: int) -> Manifest | BrokenSlot:
        path = layout.manifest(slot)
        try:
            manifest = decode_manifest(store.read(path), path)
        except (SnapshotCorrupt, FormatUnsupported) as error:
            return BrokenSlot(slot, str(error))
        except NotFound:
            return BrokenSlot(slot, f"{path}: missing although later manifests exist; it was deleted by hand")
        if (manifest.sequence, manifest.run) != (slot, layout.run):
            return BrokenSlot(slot, f"{path}: holds manifest {manifest.sequence} of run {manifest.run}; it was moved")
        return manifest

    with ThreadPoolExecutor(_READERS, thread_name_prefix="midflight-manifests") as pool:
        return tuple(pool.map(read, slots))


class ManifestLog:
    """The log as one writer sees it. `claim` first; then only slot last-seen + 1 is ever tried.

    `writer` must be a token that no other process uses: it decides whether an ambiguous slot is ours.
    """

    def __init__(self, store: Store, layout: RunLayout, writer: str) -> None:
        self._store = store
        self._layout = layout
        self._writer = writer
        self._last: int | None = None
        self._winner: str | None = None
        self._known: dict[int, Manifest | BrokenSlot] = {}
        self._lock = threading.RLock()

    @property
    def writer(self) -> str:
        """The token of this writer."""
        return self._writer

    @property
    def last_seen(self) -> int | None:
        """The newest slot this writer knows of; None before `claim`."""
        return self._last

    def read(self) -> tuple[Manifest | BrokenSlot, ...]:
        """Every slot, in order. Whole slots never change, so those read before are not read again."""
        with self._lock:
            slots = range(_last_slot(self._store, self._layout) + 1)
            missing = [slot for slot in slots if not isinstance(self._known.get(slot), Manifest)]
            self._known.update(zip(missing, _read_slots(self._store, self._layout, missing), strict=True))
            return _refuse_stale(self._layout, [self._known[slot] for slot in slots])

    def claim(self) -> Manifest:
        """Take over the run: every earlier writer is fenced from now on."""
        with self._lock:
            for _ in range(_CLAIM_ATTEMPTS):
                sequence = _last_slot(self._store, self._layout) + 1
                manifest = self._complete(ManifestDraft(kind="claim"), sequence)
                if self._create(manifest) is None:
                    self._last, self._winner = sequence, None
                    return manifest
        raise StoreUnavailable(
            f"run {self._layout.run}: lost {_CLAIM_ATTEMPTS} races for a claim; end the other controllers"
        )

    def follow(self) -> int:
        """Publish behind the newest slot without a claim, and return its number (-1: the log is empty).

        For tools: whoever publishes in between wins, and the next `append` raises Fenced. One that succeeds fences
        every earlier writer, as a claim does.
        """
        with self._lock:
            self._last, self._winner = _last_slot(self._store, self._layout), None
            return self._last

    def append(self, draft: ManifestDraft) -> Manifest:
        """Publish in slot last-seen + 1.

        Raises: Fenced when another writer has that slot, for ever; StoreUnavailable when nothing was
        published; StoreOutcomeUnknown when that could not be found out (append again: a late success is
        recognized).
        """
        with self._lock:
            if self._last is None:
                raise BrokenInvariant(f"run {self._layout.run}: a writer publishes before it has claimed the run")
            while True:
                self._refuse_when_fenced()
                sequence = self._last + 1
                self._require_same_log()
                manifest = self._complete(draft, sequence)
                winner = self._create(manifest)
                if winner is None:
                    self._last = sequence
                    return manifest
                if winner == self._writer:
                    # An earlier publication of ours whose outcome was unknown did happen: go on behind it.
                    self._last = sequence
                    continue
                self._winner = f"{winner!r} in {self._layout.manifest(sequence)}"

    def refuse_when_lost(self) -> None:
        """Look whether another writer has taken the next slot. Raises: Fenced; StoreUnavailable."""
        with self._lock:
            if self._last is not None and self._winner is None:
                path = self._layout.manifest(self._last + 1)
                try:
                    winner = _writer_of(self._store.read(path), path)
                except NotFound:
                    return
                if winner != self._writer:  # a late success of our own is for `append` to find
                    self._winner = f"{winner!r} in {path}"
            self._refuse_when_fenced()

    def _refuse_when_fenced(self) -> None:
        if self._winner is not None:
            raise Fenced(
                f"run {self._layout.run}: writer {self._writer!r} was fenced by {self._winner}; "
                "it publishes nothing more, end this controller"
            )

    def _require_same_log(self) -> None:
        """A folder that was unmounted, or a bucket that was made anew, looks like an empty store."""
        if self._last is not None and self._last >= 0 and not self._store.exists(self._layout.manifest(self._last)):
            raise StoreUnavailable(
                f"store {self._store.url}: {self._layout.manifest(self._last)}, which was there, is gone: the store "
                "was unmounted or replaced. Nothing is published until it is back"
            )

    def _complete(self, draft: ManifestDraft, sequence: int) -> Manifest:
        return Manifest(
            **{name: getattr(draft, name) for name in ManifestDraft.model_fields},
            format_version=1,
            sequence=sequence,
            run=self._layout.run,
            writer=self._writer,
            created_at=time.time(),
        )

    def _create(self, manifest: Manifest) -> str | None:
        """None when the slot holds exactly this manifest; else the writer that the slot names."""
        path, data = self._layout.manifest(manifest.sequence), encode_manifest(manifest)
        try:
            self._store.create_exclusive(path, data)
        except (AlreadyExists, StoreOutcomeUnknown) as error:
            # Clients repeat requests by themselves, so that "exists already" may be our own success.
            held = self._read_back(path, error)
            return None if held == data else _writer_of(held, path)
        return None

    def _read_back(self, path: str, error: Exception) -> bytes:
        try:
            return self._store.read(path)
        except NotFound as absent:
            raise StoreUnavailable(f"{path}: it was not written ({error}); publish again") from absent
        except StoreUnavailable as unknown:
            raise StoreOutcomeUnknown(f"{path}: {error}; reading it back failed too: {unknown}") from unknown


def _writer_of(data: bytes, path: str) -> str:
    try:
        return decode_manifest(data, path).writer
    except (SnapshotCorrupt, FormatUnsupported) as error:
        return f"an unknown writer ({error})"
