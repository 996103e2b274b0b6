"""How long the compute stream waited on communication, and how long communication took in all.

Neighbours: `collectives.py` reports here; `train/loop.py` reads `comm_share` and `comm_time_share` once a step.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch

from raydz.dist.waits import StreamWaits


class CommClock:
    """Accumulates communication time of one engine between two calls of `take`.

    Units: seconds. `waited_s` is time in which computation stood still for communication: on a CPU the time inside
    launch and wait calls, on a GPU the time the compute stream spent between the events before and after each wait.
    `total_s` is time in which at least one collective was under way, from launch to the end of its wait, hidden behind
    computation or not (an upper bound where the wait comes long after the transfer ended).
    """

    def __init__(self, device: torch.device) -> None:
        self._waits = StreamWaits(device)
        self._total_s = 0.0
        self._under_way = 0
        self._busy_since = 0.0
        self.elements_sent = 0
        """Elements this rank put on the wire since the start, (N-1)/N of each flat tensor."""

    def waiting(self) -> AbstractContextManager[None]:
        """Count the body as time that computation waits for communication."""
        return self._waits.measuring()

    def launched(self) -> None:
        """A collective was launched."""
        if self._under_way == 0:
            self._busy_since = time.perf_counter()
        self._under_way += 1

    def completed(self) -> None:
        """A launched collective was waited for."""
        self._under_way -= 1
        if self._under_way == 0:
            self._total_s += time.perf_counter() - self._busy_since

    def take(self) -> tuple[float, float]:
        """Return (waited_s, total_s) since the last call and start again.

        Blocking: on a GPU waits for the last recorded event, so call it where the step synchronises anyway.
        """
        waited_s = self._waits.take()
        taken = (waited_s, max(self._total_s, waited_s))
        self._total_s = 0.0
        return taken
