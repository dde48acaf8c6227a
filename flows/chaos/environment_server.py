"""An environment server of one scenario, on a port of its own; started again there when it dies, as its host would."""

import subprocess
import sys
import time
from pathlib import Path

import httpx

from flows.failures import ChaosFailed
from flows.processes import free_port, tail
from gpu_workers.environments.http_messages import CONTROL

_READY_S = 60.0
_POLL_S = 0.05


class EnvironmentServer:
    """`python -m gpu_workers.environments.http_server`, for as long as the block runs."""

    def __init__(self, instance: str, log: Path) -> None:
        self._instance = instance
        self._log = log
        self._port = free_port()
        self._process = self._start()

    def __enter__(self) -> "EnvironmentServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Its process now."""
        return self._process.pid

    def revive(self) -> bool:
        """Start it again if it has died; whether it had."""
        if self._process.poll() is None:
            return False
        self._process = self._start()
        return True

    def _start(self) -> "subprocess.Popen[bytes]":
        module = "gpu_workers.environments.http_server"
        options = ["--port", str(self._port), "--instance", self._instance, "--without-token"]
        with self._log.open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *options], stdout=log, stderr=log)
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise ChaosFailed(f"the environment server did not start; {self._log}:\n{tail(self._log)}")
            time.sleep(_POLL_S)
        return process

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}{CONTROL}/status", timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            return False
