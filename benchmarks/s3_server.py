"""A real S3 server process (moto) with one bucket; its address and credentials are in the environment meanwhile."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from flows.processes import free_port

BUCKET = "midflight"
START_DEADLINE_S = 30.0


@contextmanager
def s3_bucket() -> Iterator[str]:
    """URL of an empty bucket."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    program = "from moto.server import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-c", program, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    settings = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    settings |= {"AWS_DEFAULT_REGION": "us-east-1"}
    before = {name: os.environ.get(name) for name in settings}
    try:
        _await_answer(f"{address}/moto-api/", server)
        os.environ.update(settings)
        urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT")).close()
        yield f"s3://{BUCKET}"
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        server.terminate()
        server.wait(10)


def _await_answer(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the S3 server did not answer at {url}")
