"""The critic of PPO: a value for the state before each sampled token, its own network and its own optimizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpu_workers.training.batches import TokenBatch, TrainingRow, pad_whole_rows
from gpu_workers.training.network import Network, load_causal_model
from gpu_workers.training.optimizer import Optimizer
from storage.run_config import RunConfig


class ValueModel(nn.Module):
    """The policy's initial model without its output layer, and a linear head that starts at zero."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        # Without nn.Linear's own initialization, which would draw from torch's generator.
        self.value_head = nn.utils.skip_init(nn.Linear, backbone.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)


class Critic(Network):
    """Values are float32, in reward units; `optimizer` updates this network alone."""

    title = "critic weights"

    def __init__(self, model_dir: Path, config: RunConfig, *, device: torch.device) -> None:
        super().__init__(_build, model_dir, dtype=config.policy.dtype, device=device)
        self.optimizer = Optimizer(
            self.parameters(),
            learning_rate=config.algorithm.critic.learning_rate,
            betas=config.algorithm.adam_betas,
            weight_decay=config.algorithm.weight_decay,
            max_gradient_norm=config.algorithm.critic.max_gradient_norm,
        )

    def values(self, batch: TokenBatch) -> Tensor:
        """Values (with gradient) of the states before a batch's sampled tokens, [T]."""
        states = self._states(batch.input_ids)[:, -batch.num_predicted :]
        return self._head(states[batch.selected])

    def final_values(self, rows: Sequence[TrainingRow]) -> Tensor:
        """Values (with gradient) of the states after each row's last token, [R]."""
        token_ids, last = pad_whole_rows(rows, device=self._device)
        return self._head(self._states(token_ids)[torch.arange(len(rows), device=self._device), last])

    def _states(self, input_ids: Tensor) -> Any:
        with self._autocast():
            return self._model.backbone(input_ids=input_ids, use_cache=False).last_hidden_state

    def _head(self, states: Any) -> Tensor:
        """The head computes in float32 also where the network below doesn't."""
        found: Tensor = self._model.value_head(states.float()).squeeze(-1)
        return found


def _build(model_dir: Path) -> ValueModel:
    return ValueModel(load_causal_model(model_dir).base_model)
