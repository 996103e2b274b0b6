"""A worker that hears nothing of its driver for long ends itself: it holds memory and can finish nothing.

Neighbours: `worker.py` keeps one for as long as it trains. What such a worker commits meanwhile is the business of the
fence (`checkpoint/generations.py`). See README.md, "A host that was cut off".
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import ray

from raydz import log
from raydz.errors import TrainingError

_CALLS_A_SECOND = 6
"""What one board is asked at most by all workers together."""
_logger = log.get(__name__)


def end_process(error: TrainingError) -> None:
    """The main thread may wait for peers that will never come: nothing but this ends the process."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def ask_every_s(limit_s: float, world_size: int) -> float:
    """Seconds between two questions of a worker: four within the limit, fewer where many workers ask."""
    return max(limit_s / 4, world_size / _CALLS_A_SECOND)


class Lifeline:
    """A thread that asks the board whether it is there; a context manager.

    Args:
        limit_s: silence of so long is the end; 0: never.
        end: what then happens to this process.
    """

    def __init__(
        self, board: Any, limit_s: float, world_size: int, end: Callable[[TrainingError], None] = end_process
    ) -> None:
        self._board, self._end = board, end
        self._every_s = ask_every_s(limit_s, world_size)
        self._limit_s = max(limit_s, 2 * self._every_s)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydz-lifeline", daemon=True)
        self._is_on = limit_s > 0

    def __enter__(self) -> Lifeline:
        if self._is_on:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._over.set()

    def _watch(self) -> None:
        heard_at = time.monotonic()
        while not self._over.wait(self._every_s):
            try:
                ray.get(self._board.stop_reason.remote(), timeout=self._every_s)
                heard_at = time.monotonic()
            except Exception as error:  # no answer, or Ray's word that there will be none: both take the same time
                silent_s = time.monotonic() - heard_at
                _logger.warning("no word of the driver for %.0f s: %s", silent_s, type(error).__name__)
                if silent_s >= self._limit_s and not self._over.is_set():
                    self._end(_lost(silent_s))
                    return


def _lost(silent_s: float) -> TrainingError:
    return TrainingError(
        "this worker has lost its driver", got=f"no answer for {silent_s:.0f} s",
        wanted="one within failure.lost_driver_s",
        remedy="the run goes on from its newest checkpoint when the driver, or another one, starts it again",
    )  # fmt: skip
