"""Records of the rollout state as plain JSON-like values and back, for tables and for digests."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from storage.records import (
    AttemptStatus,
    BufferedGroup,
    CallSampling,
    DroppedPrompt,
    EpisodeRecord,
    GroupPhase,
    GroupStatus,
    LedgerGroup,
    PartialCall,
    Progress,
    PromptRef,
    RecoveryLevel,
    RolloutState,
    SealedSibling,
    Sibling,
    SourcePosition,
    TrainedGroup,
)

Plain = dict[str, Any]


def plain_prompt(prompt: PromptRef) -> Plain:
    """A prompt reference."""
    return {"prompt_id": prompt.prompt_id, "epoch": prompt.epoch, "content_hash": prompt.content_hash}


def prompt_from(plain: Mapping[str, Any]) -> PromptRef:
    """A prompt reference."""
    return PromptRef(plain["prompt_id"], plain["epoch"], plain["content_hash"])


def plain_buffered(group: BufferedGroup) -> Plain:
    """A finished group."""
    return {
        **plain_prompt(group.prompt),
        "order": group.order,
        "target_step": group.target_step,
        "start_version": group.start_version,
        "row_ids": list(group.row_ids),
        "rewards": list(group.rewards),
        "num_tokens": group.num_tokens,
        "version_tokens": [{"version": v, "tokens": n} for v, n in group.version_tokens],
        "claimed_by": group.claimed_by,
    }


def buffered_from(plain: Mapping[str, Any]) -> BufferedGroup:
    """A finished group."""
    return BufferedGroup(
        prompt=prompt_from(plain),
        order=plain["order"],
        target_step=plain["target_step"],
        start_version=plain["start_version"],
        row_ids=tuple(plain["row_ids"]),
        rewards=tuple(plain["rewards"]),
        num_tokens=plain["num_tokens"],
        version_tokens=tuple((span["version"], span["tokens"]) for span in plain["version_tokens"]),
        claimed_by=plain["claimed_by"],
    )


def plain_trained(trained: TrainedGroup) -> Plain:
    """A group trained since the anchor."""
    return {"step": trained.step, "position": trained.position, **plain_buffered(trained.group)}


def trained_from(plain: Mapping[str, Any]) -> TrainedGroup:
    """A group trained since the anchor."""
    return TrainedGroup(plain["step"], plain["position"], buffered_from(plain))


def plain_ledger_group(group: LedgerGroup) -> Plain:
    """An unfinished group with its siblings."""
    return {
        **plain_prompt(group.prompt),
        "level": group.level.value,
        "batch": group.batch,
        "order": group.order,
        "phase": group.phase.value,
        "status": group.status.value,
        "target_step": group.target_step,
        "start_version": group.start_version,
        "siblings": [_plain_sibling(sibling) for sibling in group.siblings],
    }


def ledger_group_from(plain: Mapping[str, Any]) -> LedgerGroup:
    """An unfinished group with its siblings."""
    return LedgerGroup(
        prompt=prompt_from(plain),
        level=RecoveryLevel(plain["level"]),
        batch=plain["batch"],
        order=plain["order"],
        siblings=tuple(_sibling_from(sibling) for sibling in plain["siblings"]),
        phase=GroupPhase(plain["phase"]),
        status=GroupStatus(plain["status"]),
        target_step=plain["target_step"],
        start_version=plain["start_version"],
    )


def plain_dropped(dropped: DroppedPrompt) -> Plain:
    """A prompt given up on purpose."""
    return {**plain_prompt(dropped.prompt), "reason": dropped.reason, "target_step": dropped.target_step}


def dropped_from(plain: Mapping[str, Any]) -> DroppedPrompt:
    """A prompt given up on purpose."""
    return DroppedPrompt(prompt_from(plain), plain["reason"], plain["target_step"])


def plain_episode(episode: EpisodeRecord) -> Plain:
    """A running episode at a turn boundary."""
    return _plain_fields(episode)


def episode_from(plain: Mapping[str, Any]) -> EpisodeRecord:
    """A running episode at a turn boundary."""
    return EpisodeRecord(**_field_values(plain))


def plain_partial_call(call: PartialCall) -> Plain:
    """A model call that has not ended."""
    return {**_plain_fields(call), "sampling": _plain_fields(call.sampling)}


def partial_call_from(plain: Mapping[str, Any]) -> PartialCall:
    """A model call that has not ended."""
    return PartialCall(**{**_field_values(plain), "sampling": CallSampling(**_field_values(plain["sampling"]))})


def _plain_fields(record: EpisodeRecord | PartialCall | CallSampling) -> Plain:
    """Every field under its name; tuples are lists."""
    plain = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def _field_values(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}


def plain_progress(progress: Progress) -> Plain:
    """Counters and cursors; the keys of `shortfall` become strings, as JSON wants them."""
    plain = {field.name: getattr(progress, field.name) for field in dataclasses.fields(progress)}
    plain["source"] = {"epoch": progress.source.epoch, "offset": progress.source.offset}
    plain["shortfall"] = {str(step): groups for step, groups in sorted(progress.shortfall.items())}
    return plain


def progress_from(plain: Mapping[str, Any]) -> Progress:
    """Counters and cursors. The caller has checked names and types."""
    return Progress(
        **{
            **plain,
            "source": SourcePosition(**plain["source"]),
            "shortfall": {int(step): groups for step, groups in plain["shortfall"].items()},
        }
    )


def plain_state(state: RolloutState, version: int) -> Plain:
    """The whole state as a version of the format knows it; equal states have equal values."""
    plain: Plain = {"progress": plain_progress(state.progress), **plain_tables(state)}
    if version < 3:
        del plain["partial_calls"]
    if version < 2:
        del plain["episodes"]
        for sibling in (sibling for group in plain["ledger"] for sibling in group["siblings"]):
            del sibling["resumes"]
    return plain


def plain_tables(state: RolloutState) -> dict[str, list[Plain]]:
    """The lines of each table, as the newest version of the format has them."""
    return {
        "ledger": [plain_ledger_group(group) for group in state.ledger],
        "replay_index": [plain_buffered(group) for group in state.buffer],
        "spare_prompts": [plain_prompt(prompt) for prompt in state.spares],
        "dropped": [plain_dropped(dropped) for dropped in state.dropped],
        "trained": [plain_trained(trained) for trained in state.trained],
        "episodes": [plain_episode(episode) for episode in state.episodes],
        "partial_calls": [plain_partial_call(call) for call in state.partial_calls],
    }


def _plain_sibling(sibling: Sibling) -> Plain:
    sealed = sibling.sealed
    return {
        "generation_index": sibling.generation_index,
        "attempt": sibling.attempt,
        "status": sibling.status.value,
        "infrastructure_failures": sibling.infrastructure_failures,
        "data_failures": sibling.data_failures,
        "sealed": None
        if sealed is None
        else {
            "call_keys": list(sealed.call_keys),
            "digests": list(sealed.digests),
            "reward": sealed.reward,
            "masked": sealed.masked,
            "num_tokens": sealed.num_tokens,
        },
        "resumes": sibling.resumes,
    }


def _sibling_from(plain: Mapping[str, Any]) -> Sibling:
    sealed = plain["sealed"]
    return Sibling(
        generation_index=plain["generation_index"],
        attempt=plain["attempt"],
        status=AttemptStatus(plain["status"]),
        infrastructure_failures=plain["infrastructure_failures"],
        data_failures=plain["data_failures"],
        sealed=None
        if sealed is None
        else SealedSibling(
            call_keys=tuple(sealed["call_keys"]),
            digests=tuple(sealed["digests"]),
            reward=sealed["reward"],
            masked=sealed["masked"],
            num_tokens=sealed["num_tokens"],
        ),
        resumes=plain.get("resumes", 0),
    )
