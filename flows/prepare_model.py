"""`python -m flows.prepare_model CACHE`: makes the tiny model of the configuration (JSON on standard input).

A process of its own, so that torch is not loaded into the command line and the work runs beside other start-up work.
"""

import sys
from pathlib import Path

from gpu_workers.models.tiny import ensure_model
from storage.run_config import RunConfig


def main() -> None:
    """Make the model unless the cache holds it."""
    ensure_model(RunConfig.model_validate_json(sys.stdin.read()), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
