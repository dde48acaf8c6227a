"""`python -m flows.tied_process PARENT COMMAND...`: becomes COMMAND with default signals, ended when PARENT dies.

A program started in the background of a shell script ignores SIGINT, and a Prefect worker in that state also ignores
its first SIGTERM; resetting before `exec` makes both work. Linux only: elsewhere nothing ties it to its parent.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Reset the signals, tie this process to its parent, and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before it could be tied to
        sys.exit(f"parent process {parent} is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
