"""Small messages between the ranks of one node, without a file, a port or a call through Ray.

Neighbours: `beats.py` sends beats through it. Datagrams over Unix sockets in Linux's abstract namespace: a name lives
as long as its process, however that ends, and a stopped receiver's queue fills up without holding up a sender.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

_LONGEST_BYTES = 4096


class NodeMail:
    """This rank's box, and the way to the others' of the same name.

    Args:
        name: the same on all ranks of a node, and unguessable.
    """

    def __init__(self, name: str, local_rank: int, local_world_size: int) -> None:
        self._local_rank = local_rank
        self._others = [f"\0{name}-{other}" for other in range(local_world_size) if other != local_rank]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{name}-{local_rank}")

    def send(self, fields: Mapping[str, Any]) -> None:
        """Send JSON values to every other rank; one that is gone, or does not read, misses them."""
        message = json.dumps([self._local_rank, dict(fields)]).encode()
        for other in self._others:
            with contextlib.suppress(OSError):
                self._socket.sendto(message, other)

    def receive(self) -> dict[int, dict[str, Any]]:
        """The newest message of each local rank that sent some since the last call."""
        newest: dict[int, dict[str, Any]] = {}
        while True:
            try:
                sender, fields = json.loads(self._socket.recv(_LONGEST_BYTES))
            except BlockingIOError:
                return newest
            newest[sender] = fields

    def close(self) -> None:
        """Give the name back."""
        self._socket.close()
