"""An HTTP proxy in front of a test's S3 server that breaks chosen answers: the network on a bad day.

Neighbours: stands between `raydz.storage` and `tests.support.seaweed.SeaweedServer`.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Matches = Callable[[str, str], bool]
STALL_S = 30.0


@dataclass
class Fault:
    """Break the next `times` answers to requests that `matches(method, path)`.

    Kinds: `busy` answers 503 and never asks the server; `lost` lets the server do its work and drops the answer;
    `reset` and `truncate` end the body halfway, with and without a TCP reset; `accept` turns any refusal into 200;
    `break` resets the connection in the middle of the request's body; `stall` never answers, for `STALL_S`.
    """

    kind: str
    matches: Matches
    times: int = 1


@dataclass
class FaultProxy:
    """A running proxy; `seen` lists (method, path with query) of every request."""

    endpoint_url: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    def next_fault(self, method: str, path: str) -> str | None:
        """Count the request; the kind of fault it meets."""
        with self.lock:
            self.seen.append((method, path))
            for fault in self.faults:
                if fault.times > 0 and fault.matches(method, path):
                    fault.times -= 1
                    return fault.kind
        return None


class FaultHandler(BaseHTTPRequestHandler):
    """One connection; `ask` passes a request on and returns status, headers and body of the answer."""

    protocol_version = "HTTP/1.1"
    proxy: FaultProxy
    upstream: str

    def log_message(self, *_: Any) -> None:
        pass

    def _relay(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        fault = self.proxy.next_fault(self.command, self.path)
        if fault == "break":
            self.rfile.read(length // 2)
            self._hang_up(reset=True)
            return
        body = self.rfile.read(length)
        if fault == "stall":
            self.proxy.closing.wait(STALL_S)
            self._hang_up(reset=True)
            return
        if fault == "busy":
            self._answer(503, {}, b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>")
            return
        status, headers, content = self.ask(body)
        if fault == "lost":
            self._hang_up(reset=True)
        elif fault in ("reset", "truncate"):
            self._answer(status, headers, content[: len(content) // 2])
            self._hang_up(reset=fault == "reset")
        elif fault == "accept":
            self._answer(200, {"ETag": '"accepted"'}, b"")
        else:
            self._answer(status, headers, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay

    def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        try:
            # The Host header is signed: the server must see the proxy's name.
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        length = headers.get("Content-Length", str(len(content)))
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content)

    def _hang_up(self, *, reset: bool) -> None:
        self.wfile.flush()
        if reset:
            # Linger 0 makes close() send RST instead of FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that go away are what this proxy is for


@contextmanager
def fault_proxy(upstream_url: str, base: type[FaultHandler] = FaultHandler) -> Iterator[FaultProxy]:
    """Run a proxy in front of `upstream_url` (http only) for the length of a with block."""

    class Handler(base):  # type: ignore[misc, valid-type]
        upstream = urlsplit(upstream_url).netloc

    server = _Server(("127.0.0.1", 0), Handler)
    Handler.proxy = FaultProxy(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Handler.proxy
    finally:
        Handler.proxy.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
