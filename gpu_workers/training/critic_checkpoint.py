"""The critic's part of a trainer checkpoint, beside the policy's; only PPO writes it.

`critic.safetensors`                  weights in float32
`critic-shard-…-model-….safetensors`  optimizer moments, in shards like the policy's
`critic.json`                         step, weights that belong to it, update counts, optimizer settings
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from gpu_workers.training.critic import Critic
from gpu_workers.training.ranks import Ranks
from gpu_workers.training.scalars import decode_scalars, encode_scalars
from gpu_workers.training.shards import copy_to_memory, decode_shards, encode_shards, naming
from gpu_workers.training.weights import weights_sha256
from storage.checkpoints import CheckpointFiles
from storage.errors import SnapshotCorrupt
from storage.manifests import FileEntry

WEIGHTS_ROLE, OPTIMIZER_ROLE = "value_weights", "value_optimizer"
ROLES = frozenset({WEIGHTS_ROLE, OPTIMIZER_ROLE})
WEIGHTS, SCALARS, PREFIX = "critic.safetensors", "critic.json", "critic-"
_FIELDS = frozenset({"step", "weights_sha256", "updates", "settings"})


@dataclass(frozen=True, slots=True)
class CriticState:
    """In CPU memory. `weights`: only on rank 0 while it is written; `moments` and `updates` as `Optimizer` has them."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    updates: Mapping[str, int]
    settings: Sequence[Mapping[str, Any]]
    step: int


def capture_critic(critic: Critic, *, step: int, rank: int) -> CriticState:
    """A copy of everything that training the critic on needs."""
    return CriticState(
        weights=copy_to_memory(critic.tensors()) if rank == 0 else {},
        moments=copy_to_memory(critic.optimizer.tensors()),
        updates=critic.optimizer.updates(),
        settings=critic.optimizer.settings(),
        step=step,
    )


def write_critic(state: CriticState, files: CheckpointFiles, ranks: Ranks) -> list[FileEntry]:
    """Write this rank's part. All ranks call it at once."""
    shards = encode_shards(state.moments, ranks)
    entries = [files.put(PREFIX + name, data, OPTIMIZER_ROLE) for name, data in shards.items()]
    if ranks.rank == 0:
        content = {
            "step": state.step,
            "weights_sha256": weights_sha256(state.weights),
            "updates": dict(state.updates),
            "settings": list(state.settings),
        }
        entries.append(files.put(WEIGHTS, save_safetensors(dict(state.weights), {"format": "pt"}), WEIGHTS_ROLE))
        entries.append(files.put(SCALARS, encode_scalars(content), OPTIMIZER_ROLE))
    return entries


def read_critic(entries: Sequence[FileEntry], files: CheckpointFiles, *, step: int) -> CriticState | None:
    """The critic in a checkpoint's entries, or None if it has none. `step`: that of the policy beside it.

    Raises: SnapshotCorrupt for missing, damaged or foreign files, naming them; FormatUnsupported.
    """
    data = {entry.path.rsplit("/", 1)[-1]: files.fetch(entry) for entry in entries if entry.role in ROLES}
    if not data:
        return None
    place = entries[0].path.rpartition("/")[0]
    shards = {name.removeprefix(PREFIX): content for name, content in data.items() if name.startswith(PREFIX)}
    missing = [name for name in (WEIGHTS, SCALARS) if name not in data]
    missing += [] if shards else [f"the critic's optimizer state ({PREFIX}shard-*.safetensors)"]
    if missing:
        raise SnapshotCorrupt(f"{place}: the checkpoint lacks {', '.join(missing)}; restore an older checkpoint")
    scalars = decode_scalars(data[SCALARS], f"{place}/{SCALARS}", _FIELDS)
    with naming(f"{place}/{WEIGHTS}"):
        weights = load_safetensors(data[WEIGHTS])
    found = (scalars["step"], scalars["weights_sha256"])
    if found != (step, weights_sha256(weights)):
        raise SnapshotCorrupt(
            f"{place}: {SCALARS} belongs to step {found[0]} and weights {found[1]}, beside it are step {step} and "
            f"weights {weights_sha256(weights)}; restore an older checkpoint"
        )
    with naming(f"{place}/{PREFIX}* ({len(shards)} files of the critic's optimizer)"):
        moments = decode_shards(shards)
    return CriticState(weights, moments, scalars["updates"], scalars["settings"], scalars["step"])
