"""A neural network of the trainer: made from a Hugging Face folder, read and written as named tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from storage.errors import ConfigurationError, RestoreRefused

COMPUTE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Network:
    """A module whose parameters are kept in float32; `build` makes it anew, as it is before any training.

    With `dtype` bfloat16 the forward pass runs in bfloat16 (autocast) over float32 parameters, so that small updates
    are not rounded away. The module stays in evaluation mode: no dropout.
    """

    title = "weights"

    def __init__(self, build: Callable[[Path], Any], model_dir: Path, *, dtype: str, device: torch.device) -> None:
        self._build = build
        self._model_dir = model_dir
        self._device = device
        self.compute_type = COMPUTE_TYPES[dtype]
        self._model = build(model_dir).to(device).eval()

    def parameters(self) -> dict[str, Tensor]:
        """Trainable parameters by name, in the model's order; a shared one (tied embeddings) appears once."""
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        """All saved tensors by name, sorted, each shared one once; live, not copies."""
        once = {name: value.detach() for name, value in self._model.named_parameters()}
        shared = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        buffers = {name: value for name, value in self._model.state_dict().items() if name not in shared}
        return dict(sorted({**once, **buffers}.items()))

    def freeze(self) -> None:
        """No parameter is trainable any more."""
        self._model.requires_grad_(False)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise RestoreRefused, naming the first differences, unless names, shapes and types are this network's."""
        own = self.tensors()
        differences = [
            f"{name}: saved {_describe(tensors.get(name))}, expected {_describe(own.get(name))}"
            for name in sorted(own.keys() | tensors.keys())
            if _describe(own.get(name)) != _describe(tensors.get(name))
        ]
        if differences:
            listed = "; ".join(differences[:3]) + (f"; {len(differences) - 3} more" if len(differences) > 3 else "")
            raise RestoreRefused(
                f"the checkpoint's {self.title} are not those of the model in {self._model_dir}: {listed}; "
                "set policy.model to the model it was trained from"
            )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over all tensors (checked before)."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])

    @torch.no_grad()
    def load_initial(self) -> None:
        """Go back to what `build` makes."""
        fresh = self._build(self._model_dir).state_dict()
        for name, value in self._model.state_dict().items():
            value.copy_(fresh[name])

    def _autocast(self) -> Any:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self.compute_type == torch.bfloat16)


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def load_causal_model(model_dir: Path) -> Any:
    """The causal language model of a Hugging Face folder, in float32. Raises ConfigurationError."""
    if not (model_dir / "config.json").is_file():
        raise ConfigurationError(f"{model_dir} holds no config.json; policy.model must be a Hugging Face model folder")
    transformers_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{model_dir} can't be loaded as a causal language model: {error}") from error
