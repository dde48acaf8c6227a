"""What vLLM's worker additionally can do: exchange the weights of the live model for those of a safetensors file.

vLLM mixes the class into its worker by name, inside the engine's process; calls arrive through `collective_rpc`.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file

_TIED_HEAD = "lm_head.weight"


class RefitExtension:
    """Methods of the vLLM worker; `vllm_config`, `model_runner` and `get_model` are the worker's own."""

    vllm_config: Any
    model_runner: Any
    get_model: Any

    def refit(self, location: str) -> int:
        """Load every weight from `location`, in the names and shapes of the model's own folder; bytes loaded.

        Names and shapes are checked before the model is touched. Raises ValueError or an I/O error.
        """
        tied = bool(self.vllm_config.model_config.hf_text_config.tie_word_embeddings)
        tensors = load_file(location)
        if tied:
            tensors.pop(_TIED_HEAD, None)
        self._check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, location)
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        if tied:
            self._refresh_tied_head()
        return sum(tensor.nbytes for tensor in tensors.values())

    def _check(self, shapes: dict[str, tuple[int, ...]], location: str) -> None:
        """The file must hold exactly the weights that the engine was started with."""
        own = _shapes_of_folder(Path(self.vllm_config.model_config.model))
        if self.vllm_config.model_config.hf_text_config.tie_word_embeddings:
            own.pop(_TIED_HEAD, None)
        different = sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name))
        if different:
            name = different[0]
            raise ValueError(
                f"{location} does not fit the engine's model: {len(different)} weights differ, such as {name} "
                f"(file {shapes.get(name, 'has none')}, model {own.get(name, 'has none')})"
            )

    def _refresh_tied_head(self) -> None:
        """On the CPU the head keeps a packed copy of the embedding, which a reload leaves as it was."""
        head = self.get_model().lm_head
        head.quant_method.process_weights_after_loading(head)


def _shapes_of_folder(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            shapes.update((name, tuple(weights.get_slice(name).get_shape())) for name in weights.keys())  # noqa: SIM118
    return shapes
