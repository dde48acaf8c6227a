"""Restores a published bundle into an empty controller, link by link:

    weights -> replay_buffer -> ledger -> spare_prompts -> cursor

Each link resets what it owns and then applies, so that it can be repeated; a link that is repeated undoes the later
ones. Nothing on disk is changed, and nothing runs until the controller starts its pumps.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpu_workers.controller.environment_checkpoint import EnvironmentCheckpoint
from gpu_workers.controller.owed import attempts_of, owe_buffered_again
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import Trainer
from gpu_workers.controller.recovery_ledger import StagedTurn, normalize_for_restart
from gpu_workers.controller.restore_checks import require_compatible
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from gpu_workers.controller.weight_sync import WeightSync
from storage.errors import BrokenInvariant
from storage.manifests import Manifest
from storage.records import (
    AttemptStatus,
    EpisodeRecord,
    LedgerGroup,
    PartialCall,
    Progress,
    RolloutState,
    RowKind,
    rollout_id,
)
from storage.rows import RowHandle
from storage.snapshot_reader import RestoredBundle

LINKS = ("weights", "replay_buffer", "ledger", "spare_prompts", "cursor")


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Sequences of the bundle to restore and of the trainer checkpoint it stands on; None for a fresh start."""

    target: int | None = None
    anchor: int | None = None


class BundleReader(Protocol):
    """Reads published bundles; blocking calls, made in a thread. Every byte is verified before it is used."""

    def manifest(self, sequence: int) -> Manifest:
        """The manifest in one slot of the log."""
        ...

    def read(self, sequence: int) -> RestoredBundle:
        """Records and rows of one bundle. Raises `SnapshotCorrupt` for any defect."""
        ...


class RolloutRestorer:
    """Fills the parts from one bundle, before the pumps start."""

    def __init__(
        self,
        parts: RolloutParts,
        trainer: Trainer,
        weight_sync: WeightSync,
        reader: BundleReader,
        environment: EnvironmentCheckpoint,
    ) -> None:
        self._environment = environment
        self._parts = parts
        self._trainer = trainer
        self._weight_sync = weight_sync
        self._reader = reader
        self._loaded: tuple[RestorePlan, RestoredBundle | None] | None = None
        self._applied: tuple[RestorePlan, tuple[str, ...]] = (RestorePlan(), ())
        self._links = {
            "weights": self._restore_weights,
            "replay_buffer": self._restore_replay_buffer,
            "ledger": self._restore_ledger,
            "spare_prompts": self._restore_spare_prompts,
            "cursor": self._restore_cursor,
        }

    async def run_link(self, link: str, plan: RestorePlan) -> Mapping[str, Any]:
        """Reset and apply one link; returns counts for the restore report.

        Raises `BrokenInvariant` when the links before it were not applied for the same plan.
        """
        if link not in LINKS:
            raise BrokenInvariant(f"restore link '{link}' does not exist; the links are {', '.join(LINKS)}")
        before = LINKS[: LINKS.index(link)]
        self._require_applied(before, plan, wanted_by=link)
        bundle = await self.bundle(plan)
        self._applied = (plan, before)
        report = await self._links[link](bundle, plan)
        self._applied = (plan, (*before, link))
        return report

    def require_complete(self, plan: RestorePlan) -> None:
        """Raise `BrokenInvariant` unless every link was applied for this plan."""
        self._require_applied(LINKS, plan, wanted_by="redispatch")

    def _require_applied(self, links: tuple[str, ...], plan: RestorePlan, *, wanted_by: str) -> None:
        applied_plan, applied = self._applied
        if links and (applied_plan != plan or applied[: len(links)] != links):
            raise BrokenInvariant(
                f"restore link '{wanted_by}' of {plan} needs the links {', '.join(links)} before it; applied are "
                f"{', '.join(applied) or 'none'} of {applied_plan}: start the restore chain again"
            )

    async def bundle(self, plan: RestorePlan) -> RestoredBundle | None:
        """The plan's bundle, read and checked against this run's configuration once."""
        if self._loaded is None or self._loaded[0] != plan:
            bundle = None
            if plan.target is not None:
                bundle = await asyncio.to_thread(self._reader.read, plan.target)
                require_compatible(self._parts, bundle)
            _require_anchor(plan, bundle)
            self._loaded = (plan, bundle)
        return self._loaded[1]

    def release(self) -> None:
        """Let go of the bundle after the chain has completed."""
        self._loaded = None

    async def reset(self) -> None:
        """Empty every part again, as before the chain."""
        self._loaded = None
        self._applied = (RestorePlan(), ())
        for link in LINKS[1:]:
            await self._links[link](None, RestorePlan())

    async def _restore_weights(self, bundle: RestoredBundle | None, plan: RestorePlan) -> Mapping[str, Any]:
        """Model, optimizer and RNG of the anchor, then a refit of all generators."""
        files = None
        if plan.anchor is not None:
            manifest = await asyncio.to_thread(self._reader.manifest, plan.anchor)
            files = [entry.model_dump() for entry in manifest.files if entry.role not in ("part", "state", "metrics")]
        step = _state(bundle).model_step
        state = self._parts.state
        self._weight_sync.forget()
        state.train_steps = state.trainer_version = step
        await self._trainer.restore(files)
        await self._weight_sync.ensure(step)
        return {"step": step, "files": len(files or ())}

    async def _restore_replay_buffer(self, bundle: RestoredBundle | None, _plan: RestorePlan) -> Mapping[str, Any]:
        """Finished groups and their training rows; none with `load_replay_buffer: false` (the ledger owes them).
        The batches that are to be trained again are always loaded.
        """
        parts, trained = self._parts, _state(bundle).trained
        groups = _state(bundle).buffer if parts.config.checkpointing.load_replay_buffer else ()
        rows = self._training_rows(bundle)
        async with parts.barrier.mutation("restore_replay_buffer") as mutation:
            parts.buffer.load(mutation, groups)
            parts.state.recorded.load(mutation, trained)
            parts.rows.load(mutation, rows)
        steps = {entry.step for entry in trained}
        return {"groups": len(groups), "rows": len(rows), "steps_to_replay": len(steps)}

    def _training_rows(self, bundle: RestoredBundle | None) -> dict[str, RowHandle]:
        """Rows of the groups that the replay buffer holds, and of recorded steps."""
        rows = _rows(bundle, RowKind.TRAINING_ROW)
        if self._parts.config.checkpointing.load_replay_buffer:
            return rows
        return {row_id: rows[row_id] for entry in _state(bundle).trained for row_id in entry.group.row_ids}

    async def _restore_ledger(self, bundle: RestoredBundle | None, _plan: RestorePlan) -> Mapping[str, Any]:
        """Unfinished groups, normalized: running attempts are abandoned, or go on from the turns that their environment
        has taken over; sealed siblings are kept by level. What the environment took over is undone if anything fails.
        """
        state = _state(bundle)
        resumed = await self._environment.restore(state.episodes)
        try:
            return await self._load_ledger(bundle, resumed)
        except BaseException:
            await self._environment.discard_restored()
            raise

    async def _load_ledger(
        self, bundle: RestoredBundle | None, resumed: Mapping[str, EpisodeRecord]
    ) -> Mapping[str, Any]:
        parts, state = self._parts, _state(bundle)
        calls = tuple(call for call in state.partial_calls if _goes_on(call, resumed, state.episodes))
        continued = {call.rollout_id for call in calls}
        normalized = [normalize_for_restart(group, resumed, continued) for group in state.ledger]
        unneeded = {key for _, keys in normalized for key in keys}
        groups = [group for group, _ in normalized]
        if not parts.config.checkpointing.load_replay_buffer and bundle is not None:
            groups += [
                owe_buffered_again(g, attempts_of(g, bundle.rows), parts.level_of(g.prompt)) for g in state.buffer
            ]
        for group in groups:
            parts.source.load(group.prompt)
        rows = self._training_rows(bundle)
        staged = _rows(bundle, RowKind.STAGED_CALL)
        rows.update((key, row) for key, row in staged.items() if key not in unneeded)
        kept = {episode.rollout_id: _staged_turns(episode, staged) for episode in resumed.values() if episode.calls}
        async with parts.barrier.mutation("restore_ledger") as mutation:
            parts.ledger.load(mutation, sorted(groups, key=lambda group: group.order), kept)
            parts.rows.load(mutation, rows)
            parts.partial_calls.load(mutation, calls, _rows(bundle, RowKind.PARTIAL_TOKENS))
        turns = sum(episode.turn for episode in resumed.values())
        return {**_count_ledger(groups), "turns_kept": turns, **self._count_calls()}

    def _count_calls(self) -> dict[str, int]:
        held = self._parts.partial_calls.held()
        return {"calls_continued": held.calls, "tokens_continued": held.tokens}

    async def _restore_spare_prompts(self, bundle: RestoredBundle | None, _plan: RestorePlan) -> Mapping[str, Any]:
        """The spare pool, present even if empty and whether or not the buffer was loaded."""
        spares = _state(bundle).spares
        for prompt in spares:
            self._parts.source.load(prompt)
        async with self._parts.barrier.mutation("restore_spare_prompts"):
            self._parts.state.spares = deque(spares)
        return {"spares": len(spares)}

    async def _restore_cursor(self, bundle: RestoredBundle | None, _plan: RestorePlan) -> Mapping[str, Any]:
        """Counters, the source's position and the sampler's cursor, which must cover every restored stamp."""
        parts, saved = self._parts, _state(bundle)
        progress, state = saved.progress, parts.state
        step_size = parts.config.algorithm.num_prompts_per_step
        nothing = SavedDispatch(sampler=parts.sampler.name)
        dispatch = nothing if bundle is None else SavedDispatch.of(saved, num_prompts_per_step=step_size)
        async with parts.barrier.mutation("restore_cursor"):
            parts.sampler.restore(dispatch)
            parts.source.seek(progress.source)
            state.train_steps = state.trainer_version = saved.model_step
            state.restored_step = progress.train_steps
            state.stamps = progress.stamps
            state.next_batch, state.next_order = progress.next_batch, progress.next_order
            state.shortfall = dict(progress.shortfall)
            state.dropped = list(saved.dropped)
        return {"train_steps": state.train_steps, "cursor": parts.sampler.cursor}

    def record_restored(self, plan: RestorePlan, bundle: RestoredBundle) -> None:
        """Trace events, once the chain is complete: what this restore threw away and what it reused."""
        self._record_abandoned(bundle)
        facts = _count_ledger(self._parts.ledger.groups())
        buffered = self._parts.buffer.ready()
        turns = self._parts.ledger.staged_turns()
        calls = self._count_calls()
        kept = sum(group.num_tokens for group in buffered) + facts.pop("tokens_kept") + sum(t.num_tokens for t in turns)
        kept += calls["tokens_continued"]
        self._parts.trace.record(
            "checkpoint_restored",
            sequence=plan.target,
            anchor_sequence=plan.anchor,
            kind=bundle.manifest.kind,
            step=bundle.state.progress.train_steps,
            model_step=bundle.state.model_step,
            steps_to_replay=bundle.state.progress.train_steps - bundle.state.model_step,
            cut_time=bundle.manifest.cut_time,
            groups_buffered=len(buffered),
            turns_kept=len(turns),
            tokens_kept=kept,
            **facts,
            **calls,
        )

    def _record_abandoned(self, bundle: RestoredBundle) -> None:
        """Every saved attempt that is not the current one any more."""
        saved = {
            rollout_id(group.group_id, s.generation_index): s.attempt
            for group in bundle.state.ledger
            for s in group.siblings
        }
        for group in bundle.state.buffer:
            saved.update(zip(group.row_ids, attempts_of(group, bundle.rows), strict=True))
        for owed in self._parts.ledger.groups():
            for sibling in owed.siblings:
                rollout = rollout_id(owed.group_id, sibling.generation_index)
                if saved[rollout] != sibling.attempt:
                    self._parts.trace.record(
                        "attempt_abandoned", rollout_id=rollout, attempt=saved[rollout], reason="restart"
                    )


def _require_anchor(plan: RestorePlan, bundle: RestoredBundle | None) -> None:
    """Rollout state fits no other trainer state than its anchor's."""
    if bundle is None:
        found = None
    elif bundle.manifest.anchor is None:
        found = bundle.manifest.sequence
    else:
        found = bundle.manifest.anchor.sequence
    if plan.anchor != found:
        raise BrokenInvariant(
            f"the restore plan pairs bundle {plan.target} with the weights of {plan.anchor}, but it stands on {found}; "
            "select again"
        )


def _state(bundle: RestoredBundle | None) -> RolloutState:
    if bundle is None:
        return RolloutState(Progress())
    manifest = bundle.manifest
    model_step = manifest.step if manifest.anchor is None else manifest.anchor.step
    if bundle.state.model_step != model_step:
        raise BrokenInvariant(
            f"bundle {manifest.sequence} describes train step {bundle.state.progress.train_steps} and recorded batches "
            f"that lead to it from step {bundle.state.model_step}, but its model is that of step {model_step}"
        )
    return bundle.state


def _staged_turns(episode: EpisodeRecord, rows: Mapping[str, RowHandle]) -> tuple[StagedTurn, ...]:
    handles = [rows[key] for key in episode.calls]
    lengths = [len(handle.batch.column("token_ids")[handle.index]) for handle in handles]
    turns = [
        StagedTurn(key, handle.digest, length)
        for key, handle, length in zip(episode.calls, handles, lengths, strict=True)
    ]
    return (*turns[:-1], replace(turns[-1], episode=episode))


def _goes_on(call: PartialCall, resumed: Mapping[str, EpisodeRecord], saved: Sequence[EpisodeRecord]) -> bool:
    """Whether a call can be continued where its rollout stands after the restore: at the turn that it is of."""
    episode = resumed.get(call.rollout_id)
    if episode is None:
        return call.turn == 0 and all(one.rollout_id != call.rollout_id for one in saved)
    return call.turn == episode.turn


def _rows(bundle: RestoredBundle | None, kind: RowKind) -> dict[str, RowHandle]:
    if bundle is None:
        return {}
    return {row_id: row for row_id, row in bundle.rows.items() if row.kind is kind}


def _count_ledger(groups: list[LedgerGroup]) -> dict[str, int]:
    siblings = [sibling for group in groups for sibling in group.siblings]
    sealed = [sibling.sealed for sibling in siblings if sibling.sealed is not None]
    resumed = sum(sibling.status is AttemptStatus.RESUMED for sibling in siblings)
    return {
        "groups_unfinished": len(groups),
        "siblings_reused": len(sealed),
        "siblings_resumed": resumed,
        "siblings_rerun": len(siblings) - len(sealed) - resumed,
        "tokens_kept": sum(result.num_tokens for result in sealed),
    }
