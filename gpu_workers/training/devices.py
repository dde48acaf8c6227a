"""Where a trainer rank computes, set up so that equal rows give equal weights."""

import torch

from storage.errors import ConfigurationError
from storage.run_config import RunConfig


def prepare_device(config: RunConfig) -> torch.device:
    """Choose the device of this process and seed nothing.

    On CPU one thread is used: reductions then have one order, so that results are bitwise reproducible, and two
    trainers on a busy machine do not spin against each other. On GPU the rank uses the first device it sees (Ray
    shows each actor its own); results there agree to rounding, not bitwise.

    Raises: ConfigurationError if a GPU is asked for and none is visible.
    """
    if config.cluster.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "cluster.device is 'gpu', but this trainer sees no CUDA device; "
            "set cluster.gpus_per_trainer to at least a fraction of a GPU or cluster.device to 'cpu'"
        )
    return torch.device("cuda", 0)
