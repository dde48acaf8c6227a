"""The random number generators of one trainer rank, as named byte tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor


class RandomState:
    """Seeds, saves and restores torch's generators of this process. Nothing draws from them unless a model does."""

    def __init__(self, *, seed: int, rank: int, device: torch.device) -> None:
        self._seed = seed
        self._rank = rank
        self._device = device

    def reset(self) -> None:
        """As at the start of a run: seeded by (run seed, rank)."""
        torch.manual_seed(((self._seed << 16) + self._rank) % (1 << 63))

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the states, uint8 on CPU, named by kind and rank."""
        states = {self._name("cpu"): torch.get_rng_state()}
        if self._device.type == "cuda":
            states[self._name("cuda")] = torch.cuda.get_rng_state(self._device)
        return states

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Take over this rank's states. A rank or device that was not there when saving starts from its seed."""
        self.reset()
        if self._name("cpu") in states:
            torch.set_rng_state(states[self._name("cpu")])
        if self._device.type == "cuda" and self._name("cuda") in states:
            torch.cuda.set_rng_state(states[self._name("cuda")], self._device)

    def _name(self, kind: str) -> str:
        return f"random.{kind}.rank{self._rank:05d}"
