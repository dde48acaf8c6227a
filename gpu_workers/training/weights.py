"""Published weights: one safetensors file per version, in memory-backed files, and the hash that identifies them."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HASHED_BYTES = 64 << 20
"""Models above this size are not hashed: at 0.5-1.5 GB/s a hash per step would cost more than 0.1 s."""

KEPT_VERSIONS = 2


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """sha256 (hex) over names and bytes in the order of names; empty above `HASHED_BYTES`, for any configuration.

    Each tensor enters as `name`, a zero byte, its length in bytes as 8 little-endian bytes, its bytes.
    """
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > HASHED_BYTES:
        return ""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        data = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(name.encode() + b"\0" + data.nbytes.to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class WeightsFolder:
    """`<folder>/version-000012/model.safetensors`, in the type generators compute in.

    A file appears whole or not at all (written beside, then renamed). After publishing version v only v and the
    version before it remain, so that a generator that is still reading v - 1 can finish; higher versions belong to a
    future that a restore has undone. There is no fsync: after a crash of the machine nobody reads these files again.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype

    def path(self, version: int) -> Path:
        """Where a version lies; its folder holds nothing else."""
        return self._folder / f"version-{version:06d}" / "model.safetensors"

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Path:
        """Write a version (again), then delete what is too old."""
        target = self.path(version)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(".model.safetensors.unfinished")
        save_file({name: self._exported(value) for name, value in tensors.items()}, unfinished, {"format": "pt"})
        os.replace(unfinished, target)
        self._keep(version)
        return target

    def _exported(self, tensor: Tensor) -> Tensor:
        wanted = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device="cpu", dtype=wanted).contiguous()

    def _keep(self, version: int) -> None:
        present = sorted(int(folder.name.removeprefix("version-")) for folder in self._folder.glob("version-*"))
        kept = [found for found in present if found <= version][-KEPT_VERSIONS:]
        for found in present:
            if found not in kept:
                shutil.rmtree(self.path(found).parent, ignore_errors=True)
