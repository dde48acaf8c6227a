"""Everything a trainer rank learns with: its networks, their optimizers, the other ranks and the settings."""

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_workers.training.critic import Critic
from gpu_workers.training.optimizer import Optimizer
from gpu_workers.training.policy import Policy
from gpu_workers.training.ranks import Ranks
from storage.algorithm_config import AlgorithmConfig
from storage.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class Learner:
    """`reference`: the frozen initial policy, only if there is a KL penalty; `critic`: only for PPO."""

    policy: Policy
    optimizer: Optimizer
    reference: Policy | None
    critic: Critic | None
    ranks: Ranks
    device: torch.device
    config: AlgorithmConfig
    seed: int
    normalization_length: int


def build_learner(config: RunConfig, model_dir: Path, ranks: Ranks, *, device: torch.device) -> Learner:
    """Load the networks that the configuration needs, all from the initial model's folder."""
    algorithm = config.algorithm

    def policy() -> Policy:
        temperature = config.generation.temperature
        return Policy(model_dir, dtype=config.policy.dtype, temperature=temperature, device=device)

    trained = policy()
    reference = policy() if algorithm.kl_coefficient > 0 else None
    if reference is not None:
        reference.freeze()
    return Learner(
        policy=trained,
        optimizer=Optimizer(
            trained.parameters(),
            learning_rate=algorithm.learning_rate,
            betas=algorithm.adam_betas,
            weight_decay=algorithm.weight_decay,
            max_gradient_norm=algorithm.max_gradient_norm,
        ),
        reference=reference,
        critic=Critic(model_dir, config, device=device) if algorithm.kind == "ppo" else None,
        ranks=ranks,
        device=device,
        config=algorithm,
        seed=config.seed,
        normalization_length=algorithm.normalization_length or config.generation.max_new_tokens,
    )
