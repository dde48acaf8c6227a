"""How trainer ranks add up what each of them computed."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as distributed
from torch import Tensor

from storage.errors import ConfigurationError

COLLECTIVE_TIMEOUT_S = 300.0
"""A rank that waits this long for another one fails, instead of waiting for ever for a dead process."""


class Ranks(Protocol):
    """All ranks of the trainer as one of them sees them.

    `saving_group` is a process group that only checkpoints use, since they are written in a thread beside training.
    It is None where there is only one rank.
    """

    rank: int
    size: int
    saving_group: Any

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in place; the same bits on every rank."""
        ...

    def maximum(self, tensor: Tensor) -> None:
        """Replace a tensor by its elementwise maximum over all ranks, in place."""
        ...


class OneRank:
    """A trainer of a single process: nothing to add."""

    rank = 0
    size = 1
    saving_group: Any = None

    def add(self, tensors: Sequence[Tensor]) -> None:
        """The sum over one rank."""

    def maximum(self, tensor: Tensor) -> None:
        """The maximum over one rank."""


class GroupOfRanks:
    """A torch.distributed process group: gloo on CPU, nccl on GPU."""

    def __init__(self, rank: int, size: int, *, rendezvous: str, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        on_gpu = device.type == "cuda"
        distributed.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=device if on_gpu else None,
        )
        # What is saved lies in CPU memory already.
        self.saving_group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum over ranks, tensor by tensor in their order."""
        for tensor in tensors:
            distributed.all_reduce(tensor, op=distributed.ReduceOp.SUM)

    def maximum(self, tensor: Tensor) -> None:
        """Maximum over ranks."""
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)


def join_ranks(rank: int, size: int, *, rendezvous: str | None, device: torch.device) -> Ranks:
    """One rank alone, or a process group that meets at `rendezvous` (`file:///path` or `tcp://host:port`)."""
    if not 0 <= rank < size:
        raise ConfigurationError(f"trainer rank {rank} of {size}; ranks go from 0 to world_size - 1")
    if size == 1:
        return OneRank()
    if rendezvous is None:
        raise ConfigurationError(
            f"{size} trainer ranks need a rendezvous they all reach: file:///path on one machine, tcp://host:port"
        )
    return GroupOfRanks(rank, size, rendezvous=rendezvous, device=device)
