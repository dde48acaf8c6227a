"""An S3 store that is slow, busy, broken, full, gone, or does not let us in: through a real server process and a proxy.

Clients of one process are kept by their options: each test has a deadline of its own, and so a client of its own.
"""

import http.client
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from storage.errors import StoreUnavailable, StoreUnsuitable
from storage.filesystem import Store, open_store

pytestmark = pytest.mark.system

_DEADLINES = (3.0 + number / 64 for number in itertools.count())
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


def _answer(status: int, code: str) -> tuple[int, bytes]:
    return status, f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()


ANSWERS = {
    "SlowDown": _answer(503, "SlowDown"),
    "InternalError": _answer(500, "InternalError"),
    "full": _answer(507, "XMinioStorageFull"),
    "quota": _answer(403, "QuotaExceeded"),
    "clock": _answer(403, "RequestTimeTooSkewed"),
    "token": _answer(400, "ExpiredToken"),
}
SAYS = {
    "SlowDown": "try again when the store answers|no answer within",
    "InternalError": "try again when the store answers|no answer within",
    "full": "the store is full: free space there",
    "quota": "the store is full: free space there",
    "clock": r"the clock of this machine differs from the store's: set it \(NTP\)",
    "token": "does not let us in: check its permissions and the credentials",
    "slow": "no answer within",
    "gone": "try again when the store answers|no answer within",
}


class Proxy(ThreadingHTTPServer):
    """Passes everything on to the server, but answers requests of `methods` with `trouble`."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream)
        self.trouble: str | None = None
        self.methods: tuple[str, ...] = ("PUT",)
        self.released = threading.Event()
        self.struck = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        trouble = self.server.trouble
        if trouble is not None and self.command in self.server.methods:
            self.server.struck += 1
            if trouble in ANSWERS:
                self._reply(*ANSWERS[trouble], {"Content-Type": "application/xml"})
                return
            if trouble == "slow":
                self.server.released.wait(60)
            self.close_connection = True
            return
        upstream = http.client.HTTPConnection(str(self.server.upstream.hostname), self.server.upstream.port, timeout=60)
        upstream.request(self.command, self.path, body=body, headers=dict(self.headers))
        answer = upstream.getresponse()
        data = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
        self._reply(answer.status, data, headers, length=answer.getheader("Content-Length"))
        upstream.close()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on

    def _reply(self, status: int, data: bytes, headers: dict[str, str], length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing to say."""


@pytest.fixture
def s3(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Proxy]]:
    """A store behind a proxy that can be told to make trouble."""
    proxy = Proxy(os.environ["AWS_ENDPOINT_URL"])
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
    try:
        yield open_store(f"s3://{s3_bucket}/{uuid.uuid4().hex}", deadline_s=next(_DEADLINES)), proxy
    finally:
        proxy.released.set()
        proxy.shutdown()
        proxy.server_close()


@pytest.mark.parametrize("trouble", SAYS)
def test_an_attempt_fails_alone_and_the_snapshot_before_stays(
    s3: tuple[Store, Proxy], open_run: Callable[..., Any], trouble: str
) -> None:
    store, proxy = s3
    run = open_run(store).claim()
    previous = run.snapshot(buffered=(1, 2))
    proxy.trouble = trouble
    with pytest.raises(StoreUnavailable, match=SAYS[trouble]) as refused:
        run.snapshot(buffered=(1, 2, 3))
    assert proxy.struck
    assert store.url in str(refused.value)
    assert run.select().target == previous
    proxy.trouble = None
    proxy.released.set()
    newest = run.snapshot(buffered=(1, 2, 3))
    assert run.select().target == newest
    assert run.select().passed_over == ()


class TroubledPublication:
    """A store with trouble from the moment a manifest is to be created."""

    def __init__(self, store: Store, proxy: Proxy) -> None:
        self._store = store
        self._proxy = proxy
        self.trouble: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create_exclusive(self, path: str, data: bytes) -> None:
        self._proxy.trouble = self.trouble
        self._store.create_exclusive(path, data)


@pytest.mark.parametrize("trouble", ["SlowDown", "gone"])
def test_a_publication_without_an_answer_can_be_tried_again(
    s3: tuple[Store, Proxy], open_run: Callable[..., Any], trouble: str
) -> None:
    store, proxy = s3
    publishing = TroubledPublication(store, proxy)
    run = open_run(publishing).claim()
    run.snapshot(buffered=(1,))
    publishing.trouble = trouble
    with pytest.raises(StoreUnavailable, match="was not written"):
        run.snapshot(buffered=(1, 2))
    publishing.trouble = proxy.trouble = None
    newest = run.snapshot(buffered=(1, 2))
    assert run.select().target == newest


def test_a_store_that_does_not_answer_at_all_is_told_by_its_address(
    s3: tuple[Store, Proxy], open_run: Callable[..., Any]
) -> None:
    store, proxy = s3
    proxy.trouble, proxy.methods = "gone", ("PUT", "GET", "HEAD", "POST")
    with pytest.raises(StoreUnavailable, match=f"store {store.url}: read run/a"):
        store.read("run/a")
    with pytest.raises(StoreUnsuitable, match="can't be written"):
        store.probe()


def test_wrong_credentials_are_named_and_change_nothing(
    s3_server: Callable[..., Any], open_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One request without a check of who asks: the one that makes the bucket.
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="1") as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        for name, value in (
            ("ACCESS_KEY_ID", "nobody"),
            ("SECRET_ACCESS_KEY", "wrong"),
            ("DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(f"AWS_{name}", value)
        store = open_store("s3://midflight/store", deadline_s=next(_DEADLINES))
        says = "does not let us in: check its permissions and the credentials in the environment"
        for call in (lambda: store.read("run/a"), lambda: store.list("run"), lambda: open_run(store).claim()):
            with pytest.raises(StoreUnavailable, match=says):
                call()
        with pytest.raises(StoreUnsuitable, match=says):
            store.probe()
