"""Looks, while a group of fewer workers than wanted trains, for room for more, and then asks it to stop and save.

Neighbours: `attempts.py` starts one beside each attempt; `board.py` carries the wish to the workers, as for Ctrl-C;
`sizing.py` decides. See README.md, "Elastic workers".
"""

from __future__ import annotations

import statistics
import threading
from typing import Any

import ray

from raydz import log
from raydz.config import Config
from raydz.orchestrate.board import Standing
from raydz.orchestrate.capacity import Claims
from raydz.orchestrate.sizing import Growth, Resources, Training, is_worth_growing, steps_up

_ANSWER_S = 30.0
_logger = log.get(__name__)


def training_of(standing: Standing, now: float, steps: int) -> Training:
    """How the group gets on, as the board knows it. Pure."""
    trained_s = None if standing.first_step_at is None else now - standing.first_step_at
    if standing.step is None or not standing.step_times_s:
        return Training(trained_s, None)
    return Training(trained_s, (steps - standing.step) * statistics.median(standing.step_times_s))


class GrowthWatch:
    """A thread of the driver; as a context manager around an attempt.

    What it claims, so that an autoscaler brings nodes and others do not take them, it gives up at the end.

    Attributes:
        wanted: the size that the group was asked to make way for; None: it was not.
    """

    def __init__(self, board: Any, config: Config, per_worker: Resources, allowed: tuple[int, ...], size: int) -> None:
        self._board, self._config, self._per_worker = board, config, per_worker
        self._steps_up, self._growth, self._size = steps_up(allowed, size), Growth(allowed, size), size
        self.wanted: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydz-growth", daemon=True)

    def __enter__(self) -> GrowthWatch:
        if self._steps_up:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_S)

    def _watch(self) -> None:
        with Claims(self._per_worker) as claims:
            while not self._over.wait(self._config.scaling.grow_check_s):
                try:
                    if self.wanted is None:
                        self._look(claims)
                except Exception as error:  # the cluster's head is gone or busy: this attempt says so by itself
                    _logger.debug("no look for more room: %s", error)

    def _look(self, claims: Claims) -> None:
        standing, now = ray.get(self._board.glance.remote(), timeout=_ANSWER_S)
        training = training_of(standing, now, self._config.train.steps)
        if not is_worth_growing(training, self._config.scaling.grow_after_s):
            claims.release()
            return
        claims.want(self._steps_up)
        size = self._growth.look(claims.placed)
        if size is None:
            return
        _logger.warning("there is room for %d workers, %d train: saving, to go on with more", size, self._size)
        self._board.ask_to_stop.remote(f"resize: room for {size} workers, {self._size} train")
        self.wanted = size
