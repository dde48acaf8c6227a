"""A real S3 server behind a gate: a proxy that passes everything on until the store is said to be down."""

import http.client
import logging
import threading
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moto.server import ThreadedMotoServer

BUCKET = "midflight"
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "date", "server"}


class GatedS3:
    """`url` is the endpoint to use. `close_at_read(text, number)` shuts the gate at the number-th read, from then on,
    of a file whose path holds the text; a shut gate answers 503 to everything.
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # one line a request otherwise
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()
        self._lock = threading.Lock()
        self._reads: Counter[str] = Counter()
        self._closes_at: tuple[str, int] | None = None
        self.is_open = True
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                gate.handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815 - http.server's names

            def log_message(self, *_arguments: Any) -> None:
                pass

        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._proxy.daemon_threads = True
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"
        request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()

    def environment(self) -> dict[str, str]:
        """The variables by which fsspec's S3 finds it, as on any machine."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def close_at_read(self, text: str, number: int) -> None:
        """Shut the gate at that read."""
        with self._lock:
            self._reads.clear()
            self._closes_at = (text, number)

    def open(self) -> None:
        """The store is back."""
        with self._lock:
            self._closes_at, self.is_open = None, True

    def stop(self) -> None:
        """End both servers."""
        self._proxy.shutdown()
        self._proxy.server_close()
        self._server.stop()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request: the real server's answer, or 503."""
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        if not self._passes(request.command, request.path):
            self._answer(request, 503, {}, b"<Error><Code>ServiceUnavailable</Code></Error>")
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            upstream.request(request.command, request.path, body, dict(request.headers))
            answer = upstream.getresponse()
            headers = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP}
            content = answer.read()
            length = answer.getheader("content-length") if request.command == "HEAD" else None
            self._answer(request, answer.status, headers, content, length)
        finally:
            upstream.close()

    def _passes(self, method: str, path: str) -> bool:
        with self._lock:
            if self._closes_at is not None and method == "GET" and self._closes_at[0] in path:
                self._reads[path] += 1
                self.is_open = self.is_open and self._reads[path] < self._closes_at[1]
            return self.is_open

    def _answer(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        length: str | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("content-length", length or str(len(content)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)
