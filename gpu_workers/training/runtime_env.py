"""Environment variables that a trainer rank needs before torch is imported."""

from storage.run_config import RunConfig


def trainer_env(config: RunConfig) -> dict[str, str]:
    """One thread on CPU: sums have a fixed order, and generators on the same cores are not slowed by spinning."""
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if config.cluster.device == "cpu":
        environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return environment
