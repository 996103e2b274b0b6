"""How long computation stood still: the host's time on a CPU, the compute stream's on a GPU.

Neighbours: `clock.py` measures waits for communication with it, `offload/` those for copies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StreamWaits:
    """Adds up between two calls of `take`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the body: work where it is done at once, or a wait of the current stream."""
        if self._device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._events.append((before, after))
            return
        since = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - since

    def take(self) -> float:
        """Seconds since the last call. Blocking: on a GPU until the last measured wait is over."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(before.elapsed_time(after) for before, after in self._events) / 1e3
            self._events.clear()
        taken, self._seconds = self._seconds, 0.0
        return taken
