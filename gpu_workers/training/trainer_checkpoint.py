"""A trainer's state as files of safetensors and JSON, none of which runs code when it is read.

`model.safetensors` + `config.json`   weights in float32 under their Hugging Face names: `from_pretrained` reads them
`shard-…-model-….safetensors`         optimizer moments and random states, by torch.distributed.checkpoint: each rank
                                      writes its share of what all hold; readers of any number of ranks join them
`trainer.json`                        step and its result, update counts, optimizer settings
"""

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from gpu_workers.controller.ports import StepResult
from gpu_workers.training.ranks import Ranks
from gpu_workers.training.weights import weights_sha256
from storage.checkpoints import CheckpointFiles
from storage.errors import FormatUnsupported, SnapshotCorrupt
from storage.manifests import FileEntry

FORMAT_VERSION = 1
WEIGHTS, CONFIG, SCALARS, SHARD_SUFFIX = "model.safetensors", "config.json", "trainer.json", ".safetensors"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Everything a checkpoint holds, in CPU memory: nothing in it changes while it is written.

    `weights` by Hugging Face name; `distributed`: moments and random states by name; `updates`: optimizer updates per
    parameter; `settings`: the optimizer's parameter groups, to be read by people; `last`: the newest step's result.
    """

    weights: Mapping[str, Tensor]
    model_config: str
    distributed: Mapping[str, Tensor]
    updates: Mapping[str, int]
    settings: Sequence[Mapping[str, Any]]
    last: StepResult


def copy_to_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies in CPU memory."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def write_state(state: TrainerState, files: CheckpointFiles, ranks: Ranks) -> list[FileEntry]:
    """Write this rank's part; the entries of all ranks together are the checkpoint. All ranks call it at once."""
    entries = []
    with tempfile.TemporaryDirectory(prefix="midflight-save-") as folder:
        _save_shards(state.distributed, folder, ranks)
        for shard in sorted(Path(folder).iterdir()):
            entries.append(files.put(shard.name, shard.read_bytes(), "optimizer"))
    if ranks.rank == 0:
        entries.append(files.put(WEIGHTS, save_safetensors(dict(state.weights), {"format": "pt"}), "weights"))
        entries.append(files.put(CONFIG, state.model_config.encode(), "config"))
        entries.append(files.put(SCALARS, _encode_scalars(state, ranks), "optimizer"))
    return entries


def read_state(entries: Sequence[FileEntry], files: CheckpointFiles) -> TrainerState:
    """Fetch and check every file, then decode it.

    Raises: SnapshotCorrupt for a missing or damaged file, naming it; FormatUnsupported for another format.
    """
    data = {entry.path.rsplit("/", 1)[-1]: files.fetch(entry) for entry in entries}
    place = entries[0].path.rpartition("/")[0] if entries else "the checkpoint"
    shards = [name for name in data if name.endswith(SHARD_SUFFIX) and name != WEIGHTS]
    missing = [name for name in (WEIGHTS, CONFIG, SCALARS) if name not in data]
    missing += [] if shards else ["the optimizer state (shard-*.safetensors)"]
    if missing:
        raise SnapshotCorrupt(f"{place}: the checkpoint lacks {', '.join(missing)}; restore an older checkpoint")
    scalars = _decode_scalars(data[SCALARS], f"{place}/{SCALARS}")
    with _named(f"{place}/{WEIGHTS}"):
        weights = load_safetensors(data[WEIGHTS])
    last = StepResult(**scalars["last"])
    if last.weights_sha256 not in ("", weights_sha256(weights)):
        raise SnapshotCorrupt(
            f"{place}: {SCALARS} belongs to weights {last.weights_sha256}, {WEIGHTS} holds {weights_sha256(weights)}; "
            "restore an older checkpoint"
        )
    with _named(f"{place}/{shards[0]} (one of {len(shards)} optimizer files)"):
        loaded = _load_shards({name: data[name] for name in shards})
    return TrainerState(
        weights=weights,
        model_config=data[CONFIG].decode(),
        distributed=loaded,
        updates=scalars["updates"],
        settings=scalars["settings"],
        last=last,
    )


def _save_shards(tensors: Mapping[str, Tensor], folder: str, ranks: Ranks) -> None:
    """DCP's safetensors writer: unlike the default one it writes no pickled `.metadata`."""
    writer = distributed_checkpoint.HuggingFaceStorageWriter(folder, save_distributed=True)
    writer.sync_files = False  # the folder is read back at once and then deleted
    with _one_process_is_meant():
        distributed_checkpoint.save(
            dict(tensors), storage_writer=writer, process_group=ranks.process_group, no_dist=ranks.size == 1
        )


def _load_shards(shards: Mapping[str, bytes]) -> dict[str, Tensor]:
    """All tensors of all ranks' shards, whole."""
    with tempfile.TemporaryDirectory(prefix="midflight-restore-") as folder, _one_process_is_meant():
        for name, data in shards.items():
            (Path(folder) / name).write_bytes(data)
        reader = distributed_checkpoint.HuggingFaceStorageReader(folder)
        found = reader.read_metadata().state_dict_metadata
        tensors = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in found.items()}
        distributed_checkpoint.load(
            tensors, storage_reader=distributed_checkpoint.HuggingFaceStorageReader(folder), no_dist=True
        )
    return tensors


def _encode_scalars(state: TrainerState, ranks: Ranks) -> bytes:
    content = {
        "format_version": FORMAT_VERSION,
        "world_size": ranks.size,
        "last": asdict(state.last),
        "updates": dict(state.updates),
        "settings": list(state.settings),
    }
    return json.dumps(content, indent=1, sort_keys=True).encode()


def _decode_scalars(data: bytes, path: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(data)
        version = content["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotCorrupt(
            f"{path}: not the scalars of a trainer ({error!r}); restore an older checkpoint"
        ) from error
    if version != FORMAT_VERSION:
        raise FormatUnsupported(
            f"{path}: format_version is {version!r}, this Midflight reads {FORMAT_VERSION}; use the one that wrote it"
        )
    expected = {"format_version", "world_size", "last", "updates", "settings"}
    if content.keys() != expected:
        different = sorted(content.keys() ^ expected)
        raise FormatUnsupported(f"{path}: unknown or missing fields {different}; use the Midflight that wrote it")
    return content


@contextmanager
def _named(file: str) -> Iterator[None]:
    """Errors of the decoders as SnapshotCorrupt that names the file."""
    try:
        yield
    except (SafetensorError, ValueError, KeyError, distributed_checkpoint.api.CheckpointException) as error:
        raise SnapshotCorrupt(f"{file}: can't be decoded ({error!r}); restore an older checkpoint") from error


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Silences DCP's warning that it runs without a process group, which is what we ask for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
