"""Hundreds of seeded ways to damage a published run: verification and restore find each, and none loads wrong data."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from storage.catalog import select
from storage.errors import NoRestorableState, NotFound
from storage.manifests import Manifest, ManifestDraft, decode_manifest, encode_manifest
from storage.records import DroppedPrompt, Progress, RecoveryLevel, SourcePosition, TrainedGroup
from storage.run_config import RunConfig
from storage.snapshot_reader import read_bundle, verify_model_files
from storage.state_schemas import STATE_KINDS
from tasks.bundle_checks import check_run, corruption

SEED = 20
REGIONS = 11
STEP_SIZE = 4
CONFIG = {
    "name": "demo",
    "algorithm": {"num_prompts_per_step": STEP_SIZE},
    "data": {"num_prompts": 16, "shuffle": False},
}


@dataclass(frozen=True)
class Mutation:
    """Files that hold something else than what was published; None: it is gone."""

    name: str
    files: dict[str, bytes | None]


class Kept:
    """A store in a dict, without the thread and deadline of each call: there are very many of them here."""

    url = "dict"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise NotFound(path)
        return self.files[path]

    def write(self, path: str, data: bytes) -> None:
        self.files[path] = data

    def create_exclusive(self, path: str, data: bytes) -> None:
        assert path not in self.files
        self.files[path] = data

    def exists(self, path: str) -> bool:
        return path in self.files

    def list(self, prefix: str) -> list[str]:
        return sorted(path for path in self.files if path.startswith(f"{prefix}/"))

    def delete(self, path: str) -> None:
        self.files.pop(path, None)


class Damaged:
    """The published run with one mutation at a time: a checkpoint, a snapshot, and a retired one before it."""

    def __init__(self, make: Any, new_run: Any) -> None:
        self.store: Any = Kept()
        self.run = new_run(self.store, make).claim()
        self.run.config = RunConfig.model_validate(CONFIG)
        progress = Progress(1, 1, SourcePosition(0, 5), sampler_cursor=1, stamps=True, shortfall={1: STEP_SIZE - 1})
        self.checkpoint = self.run.checkpoint(1, buffered=(4,), progress=progress)
        self.older = self._snapshot(make, buffered=(5, 6), ledger=(7, 8), spares=(9,), passed=11)
        self.target = self._snapshot(make, buffered=(5, 6, 7), ledger=(8, 11), spares=(9, 12), passed=13)
        self.retired = self.run.log.append(ManifestDraft(kind="retired", retires=(self.older.sequence,)))
        bundles = (self.checkpoint, self.target)
        live = {entry.path for manifest in bundles for entry in manifest.files}
        self.files = {p: data for p, data in self.store.files.items() if p in live or p.startswith("demo/manifests/")}
        self.all = dict(self.store.files)
        self.loads = {
            m.logical_digest: self._content(read_bundle(self.store, self.run.layout, m)) for m in (*bundles, self.older)
        }
        self.needed = {
            entry.path for m in (self.target, self.checkpoint) for entry in m.files if self._restores(m, entry)
        }
        self.needed |= {self.run.layout.manifest(m.sequence) for m in (self.target, self.checkpoint)}

    def _restores(self, manifest: Manifest, entry: Any) -> bool:
        return manifest is self.target or entry.role not in ("part", "state")

    def _snapshot(self, make: Any, *, buffered: Any, ledger: Any, spares: Any, passed: int) -> Manifest:
        """Prompts 0 to 3 were trained in step 1, 4 in step 2, 10 was given up; the first unfinished one is in the
        middle of a response.
        """
        trained, trained_rows = make.buffered(4)
        state, rows = make.state(
            buffered=buffered,
            ledger=ledger,
            spares=tuple(make.prompt(spare) for spare in spares),
            dropped=(DroppedPrompt(make.prompt(10), f"failure {passed}", None),),
            trained=(TrainedGroup(2, 0, trained),),
        )
        finished = tuple(replace(group, target_step=2) for group in state.buffer)
        unfinished = tuple(
            replace(group, target_step=step, batch=step)
            for group, step in zip(state.ledger, itertools.chain([2] * (STEP_SIZE - len(finished)), [3]), strict=False)
        )
        ahead = sum(group.target_step == 3 for group in unfinished)
        progress = Progress(2, 2, SourcePosition(0, passed), sampler_cursor=2 + ahead, stamps=True, next_order=passed)
        if ahead:
            progress = replace(progress, shortfall={3: STEP_SIZE - ahead})
        running = replace(unfinished[0], level=RecoveryLevel.PREFIX)
        call, chunks = make.partial_call(running, 1, cuts=(3, passed))
        state = replace(
            state, buffer=finished, ledger=(running, *unfinished[1:]), progress=progress, partial_calls=(call,)
        )
        captured = self.run.bundle(state, rows | trained_rows | chunks, anchor=self.checkpoint)
        written: Manifest = self.run.writer.write(captured)
        return written

    @staticmethod
    def _content(bundle: Any) -> Any:
        return bundle.state, bundle.rows

    def apply(self, mutation: Mutation) -> None:
        for path, data in mutation.files.items():
            if data is None:
                self.store.delete(path)
            else:
                self.store.write(path, data)

    def undo(self, mutation: Mutation) -> None:
        self.apply(Mutation("undo", {path: self.all.get(path) for path in mutation.files}))

    def require_found(self, mutation: Mutation) -> None:
        """Verification names a defect; a restore refuses or passes over what it needs, and loads what was published.

        Files that neither the log nor the restored bundles name are not read by a restore at all.
        """
        checks = check_run(self.store, self.run.layout)
        assert any(check.problem for check in checks), f"verification did not find: {mutation.name}"
        if not any(path in self.needed or "/manifests/" in path for path in mutation.files):
            return
        try:
            chosen = select(self.store, self.run.layout)
        except NoRestorableState:
            return
        if mutation.files.keys() & self.needed:
            assert chosen.passed_over, f"a restore did not tell: {mutation.name}"
        if chosen.target is None:
            raise AssertionError(f"a restore starts from nothing: {mutation.name}")
        loaded = self._content(read_bundle(self.store, self.run.layout, chosen.target))
        assert loaded == self.loads[chosen.target.logical_digest], f"wrong data was loaded: {mutation.name}"
        if chosen.anchor is not None:
            verify_model_files(self.store, chosen.anchor)
            assert chosen.anchor == self.checkpoint

    def signed(self, manifest: Manifest, **changes: Any) -> bytes:
        """A manifest with other content and everything else in order, checksum included."""
        return encode_manifest(manifest.model_copy(update=changes))


@pytest.fixture(scope="module")
def damaged(make_once: Any, new_run: Any) -> Damaged:
    return Damaged(make_once, new_run)


def _flips(damaged: Damaged, rng: random.Random) -> Iterator[Mutation]:
    """One bit in each of `REGIONS` regions of every file."""
    for path, data in damaged.files.items():
        for region in range(min(REGIONS, len(data))):
            start, end = len(data) * region // REGIONS, max(len(data) * (region + 1) // REGIONS, 1)
            place, bit = rng.randrange(min(start, end - 1), end), rng.randrange(8)
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            yield Mutation(f"bit {bit} of byte {place} of {path}", {path: bytes(flipped)})


def _lengths(damaged: Damaged, rng: random.Random) -> Iterator[Mutation]:
    newest = damaged.run.layout.manifest(damaged.retired.sequence)
    for path, data in damaged.files.items():
        if path != newest:  # a log without its newest slot is the log as it was before that was published
            yield Mutation(f"{path} is missing", {path: None})
        yield Mutation(f"{path} is empty", {path: b""})
        yield Mutation(f"{path} lacks its last byte", {path: data[:-1]})
        yield Mutation(f"{path} is torn", {path: data[: rng.randrange(1, len(data))]})
        yield Mutation(f"{path} has an extra byte", {path: data + b"\0"})


def _swaps(damaged: Damaged, rng: random.Random) -> Iterator[Mutation]:
    """The contents of two files, of one folder or of two."""
    paths = sorted(damaged.files)
    for _ in range(50):
        one, other = rng.sample(paths, 2)
        yield Mutation(f"{one} and {other} swapped", {one: damaged.files[other], other: damaged.files[one]})


def _mixed(damaged: Damaged) -> Iterator[Mutation]:
    """A manifest in order that names a file of the other snapshot, of each kind, leaves one out or has one more."""
    layout = damaged.run.layout
    for here, there in ((damaged.target, damaged.older), (damaged.target, damaged.checkpoint)):
        path = layout.manifest(here.sequence)
        for kind in STATE_KINDS:
            foreign = next(entry for entry in there.files if entry.kind == kind)
            files = tuple(foreign if entry.kind == kind else entry for entry in here.files)
            if files == here.files:
                continue  # equal tables of one writer are one file
            yield Mutation(f"{path} with the {kind} of {there.sequence}", {path: damaged.signed(here, files=files)})
        for entry in here.files:
            files = tuple(other for other in here.files if other != entry)
            yield Mutation(f"{path} without {entry.path}", {path: damaged.signed(here, files=files)})
        extra = [e for e in there.files if e not in here.files and e.role in ("part", "state")]
        for entry in extra:
            yield Mutation(f"{path} with extra {entry.path}", {path: damaged.signed(here, files=(*here.files, entry))})
        for name in ("counts", "logical_digest"):
            changed = damaged.signed(here, **{name: getattr(there, name)})
            yield Mutation(f"{path} with the {name} of {there.sequence}", {path: changed})
        for field, value in (("run", "other"), ("sequence", 9), ("kind", "trainer_checkpoint")):
            yield Mutation(f"{path} as {field} {value}", {path: damaged.signed(here, **{field: value})})
        anchor = here.anchor
        assert anchor is not None
        for changes in ({"step": 3}, {"sequence": 0}, {"sequence": 77}, {"identity": "other"}):
            moved = damaged.signed(here, anchor=anchor.model_copy(update=changes))
            yield Mutation(f"{path} anchored at {changes}", {path: moved})


def _claims(damaged: Damaged) -> Iterator[Mutation]:
    """The stale claim and the stale writer: what a fenced controller might have left, or somebody copied in."""
    layout, claim = damaged.run.layout, damaged.files[damaged.run.layout.manifest(0)]
    last = damaged.retired.sequence
    for sequence in range(1, last + 2):
        yield Mutation(f"the first claim in slot {sequence}", {layout.manifest(sequence): claim})
    taken_over = damaged.signed(decode_manifest(claim, "claim"), sequence=last + 1, writer="second")
    for stale in (damaged.target, damaged.checkpoint, damaged.retired):
        late = damaged.signed(stale, sequence=last + 2)
        files: dict[str, bytes | None] = {layout.manifest(last + 1): taken_over, layout.manifest(last + 2): late}
        yield Mutation(f"a {stale.kind} by a writer that had lost the run", files)
    yield Mutation("garbage in the next slot", {layout.manifest(last + 1): b"garbage"})
    yield Mutation("a gap in the log", {layout.manifest(last + 3): damaged.signed(damaged.target, sequence=last + 3)})


def mutations(damaged: Damaged) -> list[Mutation]:
    """All of them, the same at every run."""
    rng = random.Random(SEED)
    return [*_flips(damaged, rng), *_lengths(damaged, rng), *_swaps(damaged, rng), *_mixed(damaged), *_claims(damaged)]


def test_every_mutation_of_a_published_run_is_found_and_none_loads_wrong_data(damaged: Damaged) -> None:
    made = mutations(damaged)
    assert len({mutation.name for mutation in made}) >= 500
    for mutation in made:
        damaged.apply(mutation)
        damaged.require_found(mutation)
        damaged.undo(mutation)
    assert corruption("demo", list(check_run(damaged.store, damaged.run.layout))) is None
    assert select(damaged.store, damaged.run.layout).target == damaged.target
