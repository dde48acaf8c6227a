"""What verifications found, beside the manifests: one small file for each bundle, replaced by the next verification.

A verdict is about one manifest, named by its checksum. One that can't be read, or that is about another manifest, says
nothing: it is named in a warning and never hides a bundle.
"""

import json
import time
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage.canonical import canonical_json, sha256
from storage.errors import NotFound, SnapshotCorrupt
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import Manifest, encode_manifest

VERDICT_VERSION = 1


class Verdict(BaseModel):
    """What one verification found in one bundle.

    `problem` is None for a whole bundle. `model_problem` is the part of it that concerns the model files of a trainer
    checkpoint, which the snapshots on it share. `drill`: a restore into a scratch runtime decided.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format_version: Literal[1]
    run: str
    sequence: Annotated[int, Field(ge=0)]
    manifest_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    verified_at: Annotated[float, Field(allow_inf_nan=False)]
    drill: bool
    problem: str | None
    model_problem: str | None


def judge(manifest: Manifest, *, problem: str, model_problem: str, drill: bool) -> Verdict:
    """A verdict of now. Empty text: no problem."""
    return Verdict(
        format_version=1,
        run=manifest.run,
        sequence=manifest.sequence,
        manifest_sha256=checksum(manifest),
        verified_at=time.time(),
        drill=drill,
        problem=problem or None,
        model_problem=model_problem or None,
    )


def checksum(manifest: Manifest) -> str:
    """sha256 of the bytes of a manifest's slot, which are canonical."""
    return sha256(encode_manifest(manifest))


def encode_verdict(verdict: Verdict) -> bytes:
    """The bytes of a verdict's file."""
    body = verdict.model_dump(mode="json")
    return canonical_json({"verification": body, "sha256": sha256(canonical_json(body))}) + b"\n"


def decode_verdict(data: bytes, path: str) -> Verdict:
    """The verdict in a file's bytes. Raises SnapshotCorrupt with the reason it can't be used."""
    try:
        envelope = json.loads(data)
        body = envelope["verification"]
        if envelope["sha256"] != sha256(canonical_json(body)):
            raise ValueError("its content is not what its sha256 says")
        if body["format_version"] != VERDICT_VERSION:
            raise ValueError(f"format_version is {body['format_version']!r}, this Midflight reads {VERDICT_VERSION}")
        return Verdict.model_validate_json(canonical_json(body))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise SnapshotCorrupt(f"{path}: {problems}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotCorrupt(f"{path}: {error}") from error


def put_verdict(store: Store, layout: RunLayout, verdict: Verdict) -> None:
    """Replace what is known of a bundle. Raises StoreUnavailable."""
    store.write(layout.verification(verdict.sequence), encode_verdict(verdict))


class Verdicts:
    """What is known of the bundles of one run: one listing, then each asked-for file once.

    `warnings` names the files that were not believed.
    """

    def __init__(self, store: Store, layout: RunLayout) -> None:
        self._store = store
        self._layout = layout
        self._present = frozenset(store.list(layout.verifications))
        self._read: dict[int, Verdict | None] = {}
        self._warnings: dict[int, str] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Files that said nothing about the bundle they are named after, with the reason."""
        return tuple(self._warnings[sequence] for sequence in sorted(self._warnings))

    def of(self, manifest: Manifest) -> Verdict | None:
        """The verdict about this very manifest, if there is one. Raises StoreUnavailable."""
        sequence = manifest.sequence
        if sequence not in self._read:
            self._read[sequence] = self._verdict_on(manifest)
        return self._read[sequence]

    def bad(self, manifest: Manifest) -> Verdict | None:
        """The verdict, if it says that the bundle is bad."""
        found = self.of(manifest)
        return found if found is not None and found.problem is not None else None

    def _verdict_on(self, manifest: Manifest) -> Verdict | None:
        path = self._layout.verification(manifest.sequence)
        if path not in self._present:
            return None
        try:
            verdict = decode_verdict(self._store.read(path), path)
        except NotFound:
            return None
        except SnapshotCorrupt as error:
            self._ignore(manifest, f"{error}")
            return None
        if (verdict.run, verdict.sequence) != (manifest.run, manifest.sequence):
            self._ignore(manifest, f"{path}: is about {verdict.run}/{verdict.sequence}, it was moved")
            return None
        if verdict.manifest_sha256 != checksum(manifest):
            self._ignore(manifest, f"{path}: is about another manifest than the one in {self._slot(manifest)}")
            return None
        return verdict

    def _ignore(self, manifest: Manifest, reason: str) -> None:
        again = f"it is ignored; `midflight verify {manifest.run}` writes it anew"
        self._warnings[manifest.sequence] = f"{reason}: {again}"

    def _slot(self, manifest: Manifest) -> str:
        return self._layout.manifest(manifest.sequence)


def known_bad(verdict: Verdict, problem: str | None = None) -> str:
    """Why a bundle is passed over without being read."""
    how = "restore drill" if verdict.drill else "verification"
    flag = " --drill" if verdict.drill else ""
    return (
        f"known to be bad since the {how} of {moment(verdict.verified_at)}: {problem or verdict.problem} "
        f"(after a repair: `midflight verify {verdict.run}{flag}`)"
    )


def moment(seconds: float) -> str:
    """A time for people, in UTC; any number is shown, since times come from files."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s since 1970"
