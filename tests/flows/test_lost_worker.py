"""What a flow run prints may go unread; it goes on."""

import subprocess
import sys

PROGRAM = """
import sys
from rich.console import Console
from flows.lost_worker import outlive_the_worker
outlive_the_worker()
console = Console()
console.print("ready", soft_wrap=True)
sys.stdin.readline()
for _ in range(3):
    console.print("to nobody")
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr, flush=True)
sys.exit(17)
"""


def test_a_process_whose_output_nobody_reads_any_more_goes_on():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    process.stdin.write("go on\n")
    process.stdin.close()
    assert process.wait(30) == 17
