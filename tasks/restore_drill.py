"""A restore drill: one bundle restored into a scratch runtime in this process, captured again and compared.

    weights -> replay_buffer -> ledger -> spare_prompts -> cursor -> capture -> the manifest's logical digest

Restorer, parts and capture are the real ones; trainer and generator are stand-ins that do no work. Nothing is
dispatched and nothing is written. What a restart changes on purpose (running attempts start again with the next number)
is taken back before the digests are compared, and only exactly that.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import pyarrow as pa

from gpu_workers.controller.bundle_publisher import BundlePublisher, Captured
from gpu_workers.controller.counted_trace import CountedTrace
from gpu_workers.controller.environment_checkpoint import NoEnvironmentCheckpoint
from gpu_workers.controller.environment_snapshot import EnvironmentSnapshot
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import GroupOrder, KnownCall, Peek, SiblingResult, StepResult, WeightsRef
from gpu_workers.controller.prompt_source import Dataset, PromptSource
from gpu_workers.controller.restorer import LINKS, RestorePlan, RolloutRestorer
from gpu_workers.controller.weight_sync import WeightSync
from gpu_workers.environments.ports import Exported
from gpu_workers.environments.tasks import build_task
from storage.errors import BrokenInvariant, ConfigurationError, FormatUnsupported, RestoreRefused, StoreError
from storage.identity import identity
from storage.layout import RunLayout
from storage.logical_digest import logical_digest
from storage.manifests import FileEntry, Manifest
from storage.records import AttemptStatus, EpisodeRecord, GroupStatus, LedgerGroup, RecoveryLevel, RolloutState, Sibling
from storage.rows import RowHandle
from storage.run_config import DataConfig, RunConfig
from storage.runs import saved_config
from storage.schemas import prompt_digest
from storage.snapshot_reader import RestoredBundle
from storage.snapshot_writer import CapturedBundle
from storage.trace import NoTrace
from tasks.saved_code import require_trusted


@dataclass(frozen=True, slots=True)
class DrillOutcome:
    """`problem` is empty when the restored state is the published one. Not `tried`: it can't be restored here."""

    tried: bool
    problem: str = ""


class Drill:
    """Restores bundles one after the other, each into parts of its own."""

    def __init__(
        self,
        dataset_of: Callable[[DataConfig], Dataset] = build_task,
        restorer: Callable[..., RolloutRestorer] = RolloutRestorer,
    ) -> None:
        self._dataset_of = dataset_of
        self._restorer = restorer

    def restore(self, bundle: RestoredBundle, anchor: Manifest | None) -> DrillOutcome:
        """Restore a bundle that was read and verified, and compare. Blocking: it has an event loop of its own.

        Raises: StoreError.
        """
        try:
            config = require_trusted(saved_config(RunLayout(bundle.manifest.run), bundle.manifest))
            parts = self._parts(config)
        except (ConfigurationError, FormatUnsupported) as error:
            return DrillOutcome(False, f"it can't be restored here: {error}")
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="midflight-drill") as own:
                captured = own.submit(asyncio.run, self._captured(parts, bundle, anchor)).result()
        except _LinkFailed as error:
            cause = error.__cause__
            if isinstance(cause, StoreError):
                raise cause from None
            if isinstance(cause, RestoreRefused):
                return DrillOutcome(False, f"it can't be restored here: {type(cause).__name__}: {cause}")
            return DrillOutcome(True, f"restore drill: link {error.link} failed: {type(cause).__name__}: {cause}")
        return DrillOutcome(True, _difference(captured, bundle) or _other_prompts(parts.source, bundle.state))

    def _parts(self, config: RunConfig) -> RolloutParts:
        """Fresh parts, as a controller makes them. Finished groups are loaded whatever the run was set to."""
        loading = config.checkpointing.model_copy(update={"load_replay_buffer": True})
        config = config.model_copy(update={"checkpointing": loading})
        return RolloutParts.empty(config, self._dataset_of(config.data), CountedTrace(NoTrace()))

    async def _captured(self, parts: RolloutParts, bundle: RestoredBundle, anchor: Manifest | None) -> Captured:
        trainer, generator = _NoTrainer(), _NoGenerator()
        reader = _Held(bundle, anchor)
        environment = _KeptEpisodes()
        restorer = self._restorer(parts, trainer, WeightSync(parts, trainer, generator), reader, environment)
        plan = RestorePlan(bundle.manifest.sequence, None if anchor is None else anchor.sequence)
        link = LINKS[0]
        try:
            for link in LINKS:
                await restorer.run_link(link, plan)
            link = "capture"
            restorer.require_complete(plan)
            publisher = BundlePublisher(parts, _NoStore(), identity=identity(parts.config).fingerprint)
            return await publisher.capture(model_step=parts.state.train_steps, environment=environment.exported())
        except Exception as error:
            raise _LinkFailed(link) from error


class _LinkFailed(Exception):
    def __init__(self, link: str) -> None:
        super().__init__(link)
        self.link = link


def _difference(captured: Captured, bundle: RestoredBundle) -> str:
    """Empty when the restored state means what was published."""
    state, rows = _as_saved(captured, bundle)
    found, expected = logical_digest(state, rows), logical_digest(bundle.state, bundle.rows)
    if found == expected:
        return ""
    saved = bundle.state
    differs = [
        name for name in (field.name for field in fields(RolloutState)) if getattr(state, name) != getattr(saved, name)
    ]
    if rows != bundle.rows:
        differs.append("rows")
    return (
        f"restore drill: what was restored has logical digest {found[:12]}, what was published {expected[:12]}; "
        f"{', '.join(differs) or 'the order of records'} differ"
    )


def _other_prompts(source: PromptSource, state: RolloutState) -> str:
    """Empty when each partial call of a task whose prompts are asked as they are was sampled after its prompt. What an
    environment or a Gym's agent asks is not known here.
    """
    prompts = {group.group_id: group.prompt for group in state.ledger}
    for call in state.partial_calls:
        prompt = prompts[call.rollout_id.rpartition("_g")[0]]
        if source.dataset.agent(prompt.prompt_id):
            continue
        asked = source.load(prompt).token_ids
        digest = prompt_digest(asked)
        if (call.prompt_tokens, call.prompt_digest) != (len(asked), digest):
            return (
                f"restore drill: partial call {call.key} was asked with {call.prompt_tokens} tokens of digest "
                f"{call.prompt_digest[:12]}, but prompt {prompt.prompt_id} has {len(asked)} of digest {digest[:12]}"
            )
    return ""


def _as_saved(captured: Captured, bundle: RestoredBundle) -> tuple[RolloutState, Mapping[str, RowHandle]]:
    """The captured state with what a restart does on purpose taken back."""
    saved = {group.group_id: group for group in bundle.state.ledger}
    rows = dict(captured.rows)
    ledger = []
    for group in captured.state.ledger:
        before = saved.get(group.group_id)
        restarted = group if before is None else _before_restart(group, before)
        ledger.append(restarted)
        if before is not None and restarted == before:
            rows |= {key: bundle.rows[key] for key in _dropped_calls(group, before)}
    episodes = tuple(replace(episode, attempt=episode.attempt - 1) for episode in captured.state.episodes)
    return replace(captured.state, ledger=tuple(ledger), episodes=episodes), rows


def _before_restart(group: LedgerGroup, saved: LedgerGroup) -> LedgerGroup:
    if len(group.siblings) != len(saved.siblings):
        return group
    siblings = tuple(
        _attempt_before(now, then, saved.level) for now, then in zip(group.siblings, saved.siblings, strict=True)
    )
    complete = all(sibling.sealed is not None for sibling in group.siblings)
    expected = GroupStatus.READY_TO_FINALIZE if complete else GroupStatus.GENERATING
    status = saved.status if group.status is expected else group.status
    return replace(group, siblings=siblings, status=status)


def _attempt_before(now: Sibling, then: Sibling, level: RecoveryLevel) -> Sibling:
    """The saved attempt, if what is there now is just what a restart makes of it; else what is there."""
    started = then.status is not AttemptStatus.RESERVED
    ended = then.sealed is None or not level.keeps_siblings
    again = replace(then, attempt=then.attempt + 1, status=AttemptStatus.RESERVED, sealed=None)
    resumed = replace(then, status=AttemptStatus.RESUMED, resumes=then.resumes + 1)
    return then if started and ended and now in (again, resumed) else now


def _dropped_calls(group: LedgerGroup, saved: LedgerGroup) -> list[str]:
    """Staged calls of siblings that are to run again."""
    pairs = zip(group.siblings, saved.siblings, strict=True)
    return [
        key for now, then in pairs if then.sealed is not None and now.sealed is None for key in then.sealed.call_keys
    ]


class _Held:
    """Gives the bundle that was read and verified already."""

    def __init__(self, bundle: RestoredBundle, anchor: Manifest | None) -> None:
        self._bundle = bundle
        self._anchor = anchor

    def manifest(self, sequence: int) -> Manifest:
        """The bundle's own manifest, or its anchor's."""
        for manifest in (self._bundle.manifest, self._anchor):
            if manifest is not None and manifest.sequence == sequence:
                return manifest
        raise BrokenInvariant(f"the restore of {self._bundle.manifest.sequence} asks for manifest {sequence}")

    def read(self, sequence: int) -> RestoredBundle:
        """The bundle."""
        if sequence != self._bundle.manifest.sequence:
            raise BrokenInvariant(f"the restore of {self._bundle.manifest.sequence} asks for bundle {sequence}")
        return self._bundle


class _KeptEpisodes(NoEnvironmentCheckpoint):
    """Stands for environments that take every episode over."""

    def __init__(self) -> None:
        self._episodes: tuple[EpisodeRecord, ...] = ()

    async def restore(self, episodes: Sequence[EpisodeRecord]) -> Mapping[str, EpisodeRecord]:
        """Each under the next attempt."""
        self._episodes = tuple(replace(episode, attempt=episode.attempt + 1) for episode in episodes)
        return {episode.rollout_id: episode for episode in self._episodes}

    async def discard_restored(self) -> None:
        """None of them."""
        self._episodes = ()

    def exported(self) -> EnvironmentSnapshot:
        """What they would export."""
        return EnvironmentSnapshot((Exported("drill", "drill", self._episodes, ()),))


class _NoTrainer:
    """A trainer without a model."""

    async def begin_step(self, step: int) -> None:
        """Never asked for."""

    async def train_microbatch(self, rows: Sequence[pa.RecordBatch]) -> Mapping[str, float]:
        """Never asked for."""
        return {}

    async def flush_microbatches(self) -> None:
        """Never asked for."""

    async def finish_step(self, step: int) -> StepResult:
        """Never asked for."""
        raise BrokenInvariant(f"a restore drill was asked to train step {step}")

    async def publish_weights(self, version: int) -> WeightsRef:
        """A name without weights behind it."""
        return WeightsRef(version, "drill")

    async def begin_save(self, prefix: str) -> None:
        """Never asked for."""

    async def finish_save(self, prefix: str) -> Sequence[Mapping[str, Any]]:
        """Never asked for."""
        return []

    async def restore(self, files: Sequence[Mapping[str, Any]] | None) -> None:
        """The files were compared before; their entries must be entries."""
        for entry in files or ():
            FileEntry(**entry)


class _NoGenerator:
    """A generator without an engine."""

    async def generate(self, order: GroupOrder) -> AsyncGenerator[SiblingResult, None]:
        """Never asked for."""
        raise BrokenInvariant(f"a restore drill was asked to generate {order.group_id}")
        yield

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        """Takes any."""
        return {}

    async def peek(self, wanted: Mapping[str, KnownCall]) -> Peek:
        """Nothing runs."""
        return Peek()

    async def abort(self, group_id: str) -> None:
        """Nothing runs."""


class _NoStore:
    """Where a drill would publish: nowhere."""

    def publish(self, bundle: CapturedBundle) -> Manifest:
        """Never asked for."""
        raise BrokenInvariant(f"a restore drill was asked to publish a {bundle.kind}")

    def checkpoint_prefix(self, step: int) -> str:
        """Never asked for."""
        raise BrokenInvariant(f"a restore drill was asked to save step {step}")

    def put_metrics(self, prefix: str, step: int, metrics: Mapping[str, float]) -> FileEntry:
        """Never asked for."""
        raise BrokenInvariant(f"a restore drill was asked to write metrics of step {step}")
