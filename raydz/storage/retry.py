"""Second tries with growing, jittered pauses, on top of boto3's own.

Neighbours: `s3_reader` and `s3_writer` wrap each ranged read and each part in it. boto3 retries a request, but
not the body of an answer that breaks off, and it gives up after one `max_attempts`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

from raydz import log
from raydz.storage.store import StoreUnavailable

T = TypeVar("T")

FIRST_PAUSE_S = 0.5


def with_retries(call: Callable[[], T], rounds: int, cancelled: threading.Event | None = None) -> T:
    """The result of `call`, tried again while it raises `StoreUnavailable`.

    Blocking: pauses of at most 0.5, 1, 2, ... s; `cancelled` ends a pause at once.

    Raises:
        StoreUnavailable: the last round's error.
    """
    stop = cancelled or threading.Event()
    for attempt in range(rounds):
        try:
            return call()
        except StoreUnavailable as error:
            # Full jitter: a thousand ranks that were throttled together must not come back together.
            pause_s = random.uniform(0.1, 1.0) * FIRST_PAUSE_S * 2**attempt
            if attempt + 1 == rounds or stop.wait(pause_s):
                raise
            log.get(__name__).info("trying again after %.1f s: %s (%s)", pause_s, error.what, error.where)
    raise AssertionError("rounds is at least 1")
