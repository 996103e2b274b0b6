"""A cap on bytes per second, over all threads and stores of a process.

Neighbours: `s3_client` asks for one where `S3Options.bandwidth_limit` is set; uploads pass through `LimitedBody`,
`s3_reader` calls `take` for what it has read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

BURST_S = 0.1
"""So much of a second's bytes may go at once after a pause."""

READ_BYTES = 256 << 10
"""A limited download is read in such pieces, so that it waits often and shortly."""


class Bandwidth:
    """Turns in the order of asking: each caller waits until what was granted before it would have passed."""

    def __init__(
        self,
        bytes_per_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait until these bytes may pass. Blocking: num_bytes / bytes_per_s, and longer while others are served."""
        with self._lock:
            now = self._now()
            self._free_at = max(self._free_at, now - BURST_S) + num_bytes / self.bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            self._sleep(wait_s)


def process_bandwidth(bytes_per_s: float) -> Bandwidth:
    """The one limit of this rate in the calling process; a forked child has its own."""
    return _of_process(bytes_per_s, os.getpid())


@cache
def _of_process(bytes_per_s: float, _pid: int) -> Bandwidth:
    return Bandwidth(bytes_per_s)


class LimitedBody:
    """A request's body that is read no faster than allowed; the HTTP library reads it in blocks of some KiB."""

    def __init__(self, body: Any, bandwidth: Bandwidth) -> None:
        self._body, self._bandwidth = body, bandwidth

    def read(self, amount: int | None = -1) -> bytes:
        """The next bytes, when they may go."""
        data: bytes = self._body.read(amount)
        self._bandwidth.take(len(data))
        return data

    def seek(self, offset: int, whence: int = 0) -> Any:
        """boto3 starts over before it repeats a request. There is no `tell`: bodies over https have none either."""
        return self._body.seek(offset, whence)
