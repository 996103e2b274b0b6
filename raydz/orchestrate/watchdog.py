"""Finds a group that hangs, says where the stuck rank is, and kills that rank so that the group is started anew.

Neighbours: `fit.py` starts one beside each attempt; ranks beat on the board (`worker.py`). A rank that merely waits
for another is not stuck: the one it waits for is. See README.md, "A hang".
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydz import log
from raydz.config.cluster import FailureConfig
from raydz.orchestrate.board import Beat, Standing

_POLL_S = 1.0
_SILENT_S = 5.0
_KILL_S = 60.0
_logger = log.get(__name__)


def silent_after_s(standing: Standing) -> float:
    """A rank whose newest beat is older does not beat; large groups beat less often."""
    return max(_SILENT_S, 2.5 * standing.beat_every_s)


def hang_limit_s(standing: Standing, config: FailureConfig) -> float:
    """How long nothing may move: a multiple of the median step, and a floor for whatever else takes time.

    Never so short that a rank that stopped could still seem to beat: another one would be blamed.
    """
    median = statistics.median(standing.step_times_s) if standing.step_times_s else 0.0
    return max(config.hang_factor * median + config.hang_floor_s, silent_after_s(standing))


def is_overdue(standing: Standing, now: float, config: FailureConfig) -> bool:
    """Whether nothing has moved for too long. Not before two steps: the first ones compile and allocate. Pure."""
    if len(standing.step_times_s) < 1 or standing.moved_at is None:
        return False
    return now - standing.moved_at > hang_limit_s(standing, config)


def find_stuck(standing: Standing, now: float, config: FailureConfig) -> list[Beat]:
    """The ranks that keep the others waiting; empty while the attempt moves, or has not ended two steps.

    Ranks that do not even beat are stuck; else those that compute while others wait; else, where all wait, those that
    launched least. Pure.
    """
    if not standing.beats or not is_overdue(standing, now, config):
        return []
    limit_s = silent_after_s(standing)
    silent = [beat for beat, at in standing.beats.values() if now - at > limit_s]
    if silent:
        return silent
    beats = [beat for beat, _ in standing.beats.values()]
    computing = [beat for beat in beats if beat.waits_for is None]
    if computing:
        return computing
    least = min(beat.calls for beat in beats)
    return [beat for beat in beats if beat.calls == least]


class Watchdog:
    """A thread of the driver that looks at the board.

    It goes on with the next round, where the attempt is not over.

    Attributes:
        found: one line about the hang it ended; None if there was none.
    """

    def __init__(self, board: Any, config: FailureConfig) -> None:
        self._board, self._config = board, config
        self.found: str | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydz-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._config.hang_floor_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_POLL_S + 1)

    def take_found(self) -> str | None:
        """`found`, for a failure that is mended: what is found next is another one."""
        found, self.found = self.found, None
        return found

    def _watch(self) -> None:
        ended = 0.0
        while not self._stopped.wait(_POLL_S):
            try:
                standing, now = ray.get(self._board.glance.remote(), timeout=30)
                if standing.created_at == ended or not is_overdue(standing, now, self._config):
                    continue
                standing, now = ray.get(self._board.standing.remote(), timeout=30)
            except Exception as error:  # the board ends with the cluster, and then so does the attempt
                _logger.debug("the watchdog cannot see the board: %s", error)
                continue
            stuck = find_stuck(standing, now, self._config)
            if stuck:
                self._end(stuck, standing, now)
                ended = standing.created_at

    def _end(self, stuck: list[Beat], standing: Standing, now: float) -> None:
        ranks = ", ".join(f"rank {beat.rank} (pid {beat.pid})" for beat in stuck)
        moved = standing.moved_at if standing.moved_at is not None else now
        self.found = f"{ranks} made no progress for {now - moved:.1f} s after step {standing.step}"
        _logger.error("hang: %s", self.found)
        for beat in stuck:
            where = NodeAffinitySchedulingStrategy(node_id=beat.node_id, soft=False)
            task = _dump_and_kill.options(scheduling_strategy=where).remote(beat.pid)
            try:
                _logger.error("stack of rank %d:\n%s", beat.rank, ray.get(task, timeout=_KILL_S))
            except Exception as error:  # the node may be what hangs: Ray's own health check ends it then
                _logger.error("rank %d could not be ended: %s", beat.rank, error)


@ray.remote(num_cpus=0, max_retries=0)
def _dump_and_kill(pid: int) -> str:
    """On the rank's host: its stack as py-spy sees it, even if it is stopped; then SIGKILL."""
    try:
        return _stack(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def _stack(pid: int) -> str:
    py_spy = shutil.which("py-spy")
    if py_spy is None:
        return "py-spy is not installed on this host: no stack"
    done = subprocess.run(
        [py_spy, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=20, check=False
    )
    return done.stdout or f"py-spy: {done.stderr.strip()}"
