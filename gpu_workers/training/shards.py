"""Named tensors that all ranks hold, saved in shards by torch.distributed.checkpoint and joined again by any number of
ranks; a shard is a safetensors file."""

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors import SafetensorError
from torch import Tensor

from gpu_workers.training.ranks import Ranks
from storage.errors import SnapshotCorrupt


def copy_to_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies in CPU memory."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def encode_shards(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, bytes]:
    """This rank's share as files by name (`shard-….safetensors`). All ranks call it at once."""
    with tempfile.TemporaryDirectory(prefix="midflight-save-") as folder:
        # DCP's safetensors writer: unlike the default one it writes no pickled `.metadata`.
        writer = distributed_checkpoint.HuggingFaceStorageWriter(folder, save_distributed=True)
        writer.sync_files = False  # the folder is read back at once and then deleted
        with _one_process_is_meant():
            distributed_checkpoint.save(
                dict(tensors), storage_writer=writer, process_group=ranks.saving_group, no_dist=ranks.size == 1
            )
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def decode_shards(shards: Mapping[str, bytes]) -> dict[str, Tensor]:
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


@contextmanager
def naming(file: str) -> Iterator[None]:
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
