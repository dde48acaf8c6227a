"""A trainer's state as files of safetensors and JSON, none of which runs code when it is read.

`model.safetensors` + `config.json`   weights in float32 under their Hugging Face names: `from_pretrained` reads them
`shard-…-model-….safetensors`         optimizer moments and random states, by torch.distributed.checkpoint: each rank
                                      writes its share of what all hold; readers of any number of ranks join them
`trainer.json`                        step and its result, update counts, optimizer settings
`reference.json`                      which frozen policy the KL penalty is measured against, if there is one
`critic…`                             PPO's critic, see `critic_checkpoint`
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from gpu_workers.controller.ports import StepResult
from gpu_workers.training import critic_checkpoint
from gpu_workers.training.critic_checkpoint import CriticState, read_critic, write_critic
from gpu_workers.training.ranks import Ranks
from gpu_workers.training.scalars import decode_scalars, encode_scalars
from gpu_workers.training.shards import decode_shards, encode_shards, naming
from gpu_workers.training.weights import weights_sha256
from storage.checkpoints import CheckpointFiles
from storage.errors import SnapshotCorrupt
from storage.manifests import FileEntry

WEIGHTS, CONFIG, SCALARS, SHARD_SUFFIX = "model.safetensors", "config.json", "trainer.json", ".safetensors"
REFERENCE = "reference.json"
_FIELDS = frozenset({"world_size", "last", "updates", "settings"})


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Everything a checkpoint holds, in CPU memory: nothing in it changes while it is written.

    `weights` by Hugging Face name; `distributed`: moments and random states by name; `updates`: optimizer updates per
    parameter; `settings`: the optimizer's parameter groups, to be read by people; `last`: the newest step's result;
    `reference_sha256`: hash of the frozen policy's weights, empty if there is none or it is too large to hash.
    """

    weights: Mapping[str, Tensor]
    model_config: str
    distributed: Mapping[str, Tensor]
    updates: Mapping[str, int]
    settings: Sequence[Mapping[str, Any]]
    last: StepResult
    critic: CriticState | None = None
    reference_sha256: str = ""


def write_state(state: TrainerState, files: CheckpointFiles, ranks: Ranks) -> list[FileEntry]:
    """Write this rank's part; the entries of all ranks together are the checkpoint. All ranks call it at once."""
    shards = encode_shards(state.distributed, ranks)
    entries = [files.put(name, data, "optimizer") for name, data in shards.items()]
    if ranks.rank == 0:
        entries.append(files.put(WEIGHTS, save_safetensors(dict(state.weights), {"format": "pt"}), "weights"))
        entries.append(files.put(CONFIG, state.model_config.encode(), "config"))
        entries.append(files.put(SCALARS, _encode_scalars(state, ranks), "optimizer"))
        if state.reference_sha256:
            content = encode_scalars({"weights_sha256": state.reference_sha256})
            entries.append(files.put(REFERENCE, content, "config"))
    return entries + ([] if state.critic is None else write_critic(state.critic, files, ranks))


def read_state(entries: Sequence[FileEntry], files: CheckpointFiles) -> TrainerState:
    """Fetch and check every file, then decode it.

    Raises: SnapshotCorrupt for a missing or damaged file, naming it; FormatUnsupported for another format.
    """
    own = [entry for entry in entries if entry.role not in critic_checkpoint.ROLES]
    data = {entry.path.rsplit("/", 1)[-1]: files.fetch(entry) for entry in own}
    place = entries[0].path.rpartition("/")[0] if entries else "the checkpoint"
    shards = [name for name in data if name.endswith(SHARD_SUFFIX) and name != WEIGHTS]
    missing = [name for name in (WEIGHTS, CONFIG, SCALARS) if name not in data]
    missing += [] if shards else ["the optimizer state (shard-*.safetensors)"]
    if missing:
        raise SnapshotCorrupt(f"{place}: the checkpoint lacks {', '.join(missing)}; restore an older checkpoint")
    scalars = decode_scalars(data[SCALARS], f"{place}/{SCALARS}", _FIELDS)
    with naming(f"{place}/{WEIGHTS}"):
        weights = load_safetensors(data[WEIGHTS])
    last = StepResult(**scalars["last"])
    if last.weights_sha256 not in ("", weights_sha256(weights)):
        raise SnapshotCorrupt(
            f"{place}: {SCALARS} belongs to weights {last.weights_sha256}, {WEIGHTS} holds {weights_sha256(weights)}; "
            "restore an older checkpoint"
        )
    with naming(f"{place}/{shards[0]} (one of {len(shards)} optimizer files)"):
        loaded = decode_shards({name: data[name] for name in shards})
    return TrainerState(
        weights=weights,
        model_config=data[CONFIG].decode(),
        distributed=loaded,
        updates=scalars["updates"],
        settings=scalars["settings"],
        last=last,
        critic=read_critic(entries, files, step=last.step),
        reference_sha256=_reference(data, f"{place}/{REFERENCE}"),
    )


def _encode_scalars(state: TrainerState, ranks: Ranks) -> bytes:
    return encode_scalars(
        {
            "world_size": ranks.size,
            "last": asdict(state.last),
            "updates": dict(state.updates),
            "settings": list(state.settings),
        }
    )


def _reference(data: Mapping[str, bytes], path: str) -> str:
    if REFERENCE not in data:
        return ""
    return str(decode_scalars(data[REFERENCE], path, frozenset({"weights_sha256"}))["weights_sha256"])
