"""A flow run outlives the Prefect worker that started it.

The worker reads what a flow run prints. When it dies, rich, by which Prefect prints log lines, would end the flow's
process at the next one.
"""

import os
import sys

from rich.console import Console


def outlive_the_worker() -> None:
    """From now on lines that nobody reads are dropped, instead of ending this process; the API gets them still."""
    Console.on_broken_pipe = _drop_output  # type: ignore[method-assign, assignment]


def _drop_output(console: Console) -> None:
    console.quiet = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
