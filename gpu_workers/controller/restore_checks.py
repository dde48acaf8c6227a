"""Whether a whole bundle fits this run: refused by name, with both values and the key to change."""

from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from storage.errors import DatasetChanged, RestoreRefused
from storage.identity import differences, identity, identity_of, with_defaults
from storage.snapshot_reader import RestoredBundle

# Restored stamps count batches of num_prompts_per_step groups.
_MUST_MATCH = (
    "algorithm.num_generations_per_prompt",
    "algorithm.num_prompts_per_step",
    "data.task",
    "data.shuffle",
    "data.seed",
)


def require_compatible(parts: RolloutParts, bundle: RestoredBundle) -> None:
    """Raise `RestoreRefused` (or `DatasetChanged`) when the bundle can't be continued under this configuration."""
    manifest = bundle.manifest
    changed = differences(identity_of(with_defaults(manifest.config)).config, identity(parts.config).config)
    if manifest.anchor is not None and manifest.anchor.kind == "bootstrap" and changed:
        raise RestoreRefused(
            f"bundle {manifest.sequence} stands on the initial model of another configuration: {'; '.join(changed)}. "
            "Restore these values or start a run with another name"
        )
    _require_dataset(parts, bundle)
    fatal = [line for line in changed if line.startswith(_MUST_MATCH)]
    if fatal:
        raise RestoreRefused(
            f"bundle {manifest.sequence} was made with other settings that can't change in a run: {'; '.join(fatal)}"
        )
    _require_sampler(parts, bundle)


def _require_sampler(parts: RolloutParts, bundle: RestoredBundle) -> None:
    """Finished groups are never left out in silence because this run's sampler can't select them."""
    step_size = parts.config.algorithm.num_prompts_per_step
    parts.sampler.require_restorable(SavedDispatch.of(bundle.state, num_prompts_per_step=step_size))
    finished = len(bundle.state.buffer)
    if finished and parts.config.checkpointing.load_replay_buffer and not parts.sampler.restores_buffers:
        raise RestoreRefused(
            f"sampler '{parts.sampler.name}' can't restore the {finished} finished groups of bundle "
            f"{bundle.manifest.sequence}; set checkpointing.load_replay_buffer to false to generate them again"
        )


def _require_dataset(parts: RolloutParts, bundle: RestoredBundle) -> None:
    saved, found = bundle.manifest.dataset_fingerprint, parts.source.dataset.fingerprint()
    if saved == found:
        return
    state = bundle.state
    for prompt in (*(g.prompt for g in state.ledger), *(g.prompt for g in state.buffer), *state.spares):
        parts.source.load(prompt)  # names the first prompt that differs
    raise DatasetChanged(
        f"the dataset's fingerprint is {found[:12]}, bundle {bundle.manifest.sequence} was made with "
        f"{str(saved)[:12]}; restore with the dataset the run was started with"
    )
