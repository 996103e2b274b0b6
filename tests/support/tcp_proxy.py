"""A TCP proxy that resets chosen connections in the middle: a stream's network on a bad day.

Neighbours: stands between `raydz submit` and a Ray dashboard. `fault_proxy.py` breaks whole HTTP answers instead.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class TcpProxy:
    """A running proxy.

    Args:
        marks: a connection whose first bytes contain one of these is reset.
        after_bytes: so many bytes of its answer are passed on before that.
        times: how many connections are; the others live.
    """

    upstream: tuple[str, int]
    marks: bytes
    after_bytes: int
    times: int
    url: str = ""
    resets: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, head: bytes) -> bool:
        """Whether this connection is one to reset; counts it."""
        with self.lock:
            if self.marks not in head or self.resets >= self.times:
                return False
            self.resets += 1
            return True

    def serve(self, client: socket.socket) -> None:
        """One connection, both ways, to its end."""
        with client, socket.create_connection(self.upstream, timeout=30) as server:
            head = client.recv(65536)
            if not head:
                return
            left = self.after_bytes if self.takes(head) else None
            server.sendall(head)
            up = threading.Thread(target=_pump, args=(client, server), daemon=True)
            up.start()
            while data := server.recv(4096):
                if left is not None and len(data) > left:
                    client.sendall(data[:left])
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends RST
                    return
                left = None if left is None else left - len(data)
                client.sendall(data)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def resetting_proxy(url: str, marks: bytes, *, after_bytes: int, times: int) -> Iterator[TcpProxy]:
    """Run a proxy in front of `url` for the length of a with block."""
    parts = urlsplit(url)
    proxy = TcpProxy((str(parts.hostname), int(parts.port or 80)), marks, after_bytes, times)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def guarded(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            proxy.serve(client)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=guarded, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
