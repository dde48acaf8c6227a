"""The policy network: scores the sampled tokens of rows."""

from pathlib import Path

import torch

from gpu_workers.training.batches import TokenBatch
from gpu_workers.training.losses import TokenScores, score_tokens
from gpu_workers.training.network import Network, load_causal_model


class Policy(Network):
    """A causal language model under its Hugging Face names; what generators get is cast to `dtype`.

    No dropout, so that log-probabilities are those of the policy that is published.
    """

    def __init__(self, model_dir: Path, *, dtype: str, temperature: float, device: torch.device) -> None:
        super().__init__(load_causal_model, model_dir, dtype=dtype, device=device)
        self._temperature = temperature

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids the model knows."""
        return int(self._model.get_input_embeddings().num_embeddings)

    @property
    def config_json(self) -> str:
        """The model's `config.json`."""
        return str(self._model.config.to_json_string(use_diff=False))

    def score(self, batch: TokenBatch, *, entropy_gradient: bool = False) -> TokenScores:
        """Log-probabilities (with gradient) and entropies (by choice with one) of the sampled tokens, [T] each."""
        with self._autocast():
            output = self._model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=batch.num_predicted)
        return score_tokens(
            output.logits[batch.selected],
            batch.targets,
            temperature=self._temperature,
            entropy_gradient=entropy_gradient,
        )
