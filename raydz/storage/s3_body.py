"""A request's body that lies in memory already and is sent from there.

Neighbours: `s3_writer` and `s3_put` wrap what their caller keeps still until the commit; `s3_client` unwraps it when it
is sent. See the note "No copies" in README.md.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def as_body(data: bytes | bytearray | memoryview) -> Any:
    """What boto3 takes as a body: `data` itself, or a file over it if it is a memoryview. No copy."""
    return MemoryBody(data) if isinstance(data, memoryview) else data


def send_from_memory(request: Any, **_: Any) -> None:
    """Before a request is sent: in place of the file its bytes, which leave in one call instead of one every 16 KiB."""
    if isinstance(request.body, MemoryBody):
        request.body = np.frombuffer(request.body.data, np.uint8).view(_Rewindable)


class MemoryBody:
    """A file of one buffer, whose blocks are views of it. It is what boto3 validates, hashes and signs."""

    def __init__(self, data: memoryview) -> None:
        self.data, self._at = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def read(self, amount: int | None = -1) -> memoryview:
        """The next `amount` bytes, or all that are left."""
        stop = len(self.data) if amount is None or amount < 0 else self._at + amount
        block = self.data[self._at : stop]
        self._at += len(block)
        return block

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; boto3 starts over before it repeats a request."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self.data)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at


class _Rewindable(np.ndarray):
    """Bytes that boto3 may start over with: it refuses to repeat a request whose body it cannot rewind."""

    def __bool__(self) -> bool:
        return len(self) > 0

    def seek(self, _offset: int) -> int:
        return 0
