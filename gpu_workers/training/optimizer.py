"""AdamW over the parameters of a network: one update from summed gradients, and a state without pickle."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from storage.errors import BrokenInvariant, SnapshotCorrupt

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Gradient clipping and AdamW.

    Settings come from the configuration, also after a restore: whether a changed configuration may go on from a
    checkpoint is decided by the run's identity, not here.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        max_gradient_norm: float,
    ) -> None:
        self._parameters = dict(parameters)
        self._max_gradient_norm = max_gradient_norm
        self._adam = torch.optim.AdamW(
            self._parameters.values(), lr=learning_rate, betas=betas, weight_decay=weight_decay
        )

    def zero_gradients(self) -> None:
        """Forget all accumulated gradients."""
        self._adam.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients of all parameters, zeros where none arrived; live tensors."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters.values()]

    def apply(self, *, denominator: int) -> float:
        """Divide summed gradients by the denominator of their mean, clip them, update the parameters.

        Returns the norm before clipping. Raises: BrokenInvariant, before anything has changed but gradients, if the
        norm isn't finite.
        """
        gradients = self.gradients()
        torch._foreach_div_(gradients, float(denominator))
        norm = get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise BrokenInvariant(f"the gradient norm is {norm.item()}; the optimizer step was not taken")
        clip_grads_with_norm_(self._parameters.values(), self._max_gradient_norm, norm)
        self._adam.step()
        return float(norm)

    def settings(self) -> list[dict[str, Any]]:
        """The parameter groups as plain values, with the names of their parameters."""
        groups = self._adam.state_dict()["param_groups"]
        names = list(self._parameters)
        return [{**group, "params": [names[index] for index in group["params"]]} for group in groups]

    def updates(self) -> dict[str, int]:
        """How many updates each parameter has seen."""
        states = {name: self._adam.state.get(value, {}) for name, value in self._parameters.items()}
        return {name: int(state["step"]) if state else 0 for name, state in states.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Both moments of every parameter as `<moment>.<parameter>`; zeros before the first update; live."""
        found = {}
        for name, value in self._parameters.items():
            state = self._adam.state.get(value, {})
            for moment in MOMENTS:
                found[f"{moment}.{name}"] = state[moment] if state else torch.zeros_like(value, requires_grad=False)
        return found

    def check(self, tensors: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        """Raise SnapshotCorrupt unless both moments and the count of every parameter are there, in its shape."""
        for name, value in self._parameters.items():
            if name not in updates:
                raise SnapshotCorrupt(f"the checkpoint lacks the update count of {name}; restore an older checkpoint")
            for moment in MOMENTS:
                saved = tensors.get(f"{moment}.{name}")
                if saved is None or saved.shape != value.shape:
                    found = "nothing" if saved is None else f"shape {tuple(saved.shape)}"
                    raise SnapshotCorrupt(
                        f"the checkpoint's optimizer state holds {found} for {moment}.{name}, "
                        f"expected shape {tuple(value.shape)}; restore an older checkpoint"
                    )

    def load(self, tensors: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        """Take over moments and counts (checked before); accumulated gradients are forgotten."""
        self.reset()
        for name, value in self._parameters.items():
            if updates[name]:
                moments = {moment: tensors[f"{moment}.{name}"].to(value.device, copy=True) for moment in MOMENTS}
                self._adam.state[value] = {"step": torch.tensor(float(updates[name])), **moments}

    def reset(self) -> None:
        """Forget all state, as before the first update."""
        self._adam.state.clear()
        self.zero_gradients()
