"""A worker's word to the board, once a second: it lives, which step it ended, what it waits for.

Neighbours: `worker.py` starts one; `watchdog.py` judges by it.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

import ray

from raydz.dist.monitor import activity
from raydz.orchestrate.board import Beat

_EVERY_S = 1.0
_RANKS_A_SECOND = 200
"""Beats that one board takes easily; larger groups beat less often."""


class Beats:
    """A thread of the worker; it stops when the process is stopped, which is what shows a hang."""

    def __init__(self, board: Any, rank: int, world_size: int) -> None:
        self._board, self._rank = board, rank
        self._every_s = max(_EVERY_S, world_size / _RANKS_A_SECOND)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raydz-beats", daemon=True)
        self.step = 0

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stopped.set()
        self._thread.join(self._every_s + 1)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            calls, waits_for = activity()
            self._board.post_beat.remote(Beat(self._rank, os.getpid(), self._node_id, self.step, calls, waits_for))
