"""Where workers leave what the driver must know: how far they are, the run's result, and the first typed error.

Neighbours: `worker.py` posts, `fit.py` and `watchdog.py` read. An actor, because Ray Train wraps exceptions in text,
returns only metrics, and takes them once every two seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydz.errors import RaydzError
from raydz.train import Result

_STEP_TIMES = 32


@dataclass(frozen=True)
class Beat:
    """What a rank said of itself.

    Args:
        step: the last one that it ended.
        calls: collectives it has launched since its start.
        waits_for: the collective it waits in; None: it computes.
    """

    rank: int
    pid: int
    node_id: str
    step: int
    calls: int
    waits_for: str | None


@dataclass
class Standing:
    """An attempt as the board knows it. Times are `time.time()` of the board's host.

    Attributes:
        created_at: when the board was.
        chose: step of the checkpoint that is to be loaded; 0: there is none.
        began: the same, once it is loaded.
        step: the last one that rank 0 ended.
        beats: by rank, the newest, and when it came.
        moved_at: when a rank last ended a step or launched a collective.
        step_times_s: of the last steps.
        beat_every_s: how often a node tells of its ranks.
    """

    created_at: float = field(default_factory=time.time)
    chose: int | None = None
    began: int | None = None
    began_at: float | None = None
    step: int | None = None
    step_at: float | None = None
    first_step_at: float | None = None
    moved_at: float | None = None
    beats: dict[int, tuple[Beat, float]] = field(default_factory=dict)
    beat_every_s: float = 1.0
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEP_TIMES))


class Board:
    """One for each attempt, owned by the driver."""

    def __init__(self) -> None:
        self._result: Result | None = None
        self._failure: RaydzError | None = None
        self._stop_reason: str | None = None
        self._standing = Standing()

    def post_result(self, result: Result) -> None:
        """Rank 0 is done."""
        self._result = result

    def post_failure(self, error: RaydzError) -> None:
        """A rank met a typed error; the first one counts."""
        self._failure = self._failure or error

    def post_chose(self, step: int) -> None:
        """The run's newest checkpoint is of this step."""
        self._standing.chose = step

    def post_began(self, step: int) -> None:
        """The checkpoint of this step is loaded, on rank 0."""
        now = time.time()
        self._standing.began, self._standing.began_at, self._standing.moved_at = step, now, now

    def post_step(self, step: int) -> None:
        """Rank 0 ended a step."""
        now, standing = time.time(), self._standing
        if standing.step_at is not None:
            standing.step_times_s.append(now - standing.step_at)
        standing.first_step_at = standing.first_step_at or now
        standing.step, standing.step_at, standing.moved_at = step, now, now

    def post_beats(self, beats: Sequence[tuple[Beat, float]], every_s: float) -> None:
        """The ranks of a node live, as of so many seconds ago; whether one also moved shows beside its last beat.

        Args:
            every_s: the node's next word comes after.
        """
        now, standing = time.time(), self._standing
        standing.beat_every_s = every_s
        for beat, age_s in beats:
            last = standing.beats.get(beat.rank)
            if last is not None and now - age_s <= last[1]:
                continue
            if last is not None and (last[0].step, last[0].calls) != (beat.step, beat.calls):
                standing.moved_at = now
            standing.beats[beat.rank] = (beat, now - age_s)

    def standing(self) -> tuple[Standing, float]:
        """The attempt, and the board's time."""
        return self._standing, time.time()

    def glance(self) -> tuple[Standing, float]:
        """The same without beats: what is looked at every second must not grow with the number of ranks."""
        return replace(self._standing, beats={}), time.time()

    def ask_to_stop(self, reason: str) -> None:
        """The driver was told to end; rank 0 looks here."""
        self._stop_reason = reason

    def stop_reason(self) -> str | None:
        """Why the run is to stop, if it is."""
        return self._stop_reason

    def failure(self) -> RaydzError | None:
        """The failure, if there was one."""
        return self._failure

    def result(self) -> Result | None:
        """The result, if rank 0 came to an end."""
        return self._result


def new_board() -> Any:
    """Start a board; it takes no CPU from the workers and ends with the driver.

    On the driver's own node: a board on a worker's node would be lost with it, and with it what the driver decides by.
    """
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0)(Board).options(scheduling_strategy=here).remote()
