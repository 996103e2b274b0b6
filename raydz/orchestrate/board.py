"""Where workers leave what the driver must know: how far they are, the run's result, and the first typed error.

Neighbours: `worker.py` and `supervisor.py` post, `fit.py`, `watchdog.py` and `referee.py` read. An actor, because Ray
Train wraps exceptions in text, returns only metrics, and takes them once every two seconds. It imports no torch: it and
the supervisors start in half the time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydz.errors import RaydzError
from raydz.orchestrate.rounds import Order, Report, Rounds, View

_STEP_TIMES = 32
_LONGEST_WAIT_S = 300.0
"""Of a supervisor for news: with 1,024 of them half a minute would be 34 calls a second, of 0.5 ms each."""
_CALLS_AT_ONCE = 16384
"""Every supervisor has one waiting."""


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
        self._result: dict[str, Any] | None = None
        self._failure: RaydzError | None = None
        self._stop_reason: str | None = None
        self._standing = Standing()
        self._rounds = Rounds()
        self._changed = asyncio.Event()

    def post_result(self, result: dict[str, Any]) -> None:
        """Rank 0 is done: the fields of its `Result`."""
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
        """Rank 0 ended a step; calls of an actor that waits for several things may overtake each other."""
        now, standing = time.time(), self._standing
        if standing.step is not None and step <= standing.step:
            return
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

    def result(self) -> dict[str, Any] | None:
        """The fields of the result, if rank 0 came to an end."""
        return self._result

    # -- rounds --------------------------------------------------------------------------------------------------------

    def relay(self, number: int, name: str, *arguments: Any) -> None:
        """Call a method for a rank's process of round `number`; word from an earlier round is dropped.

        So is, but for the result, what comes after the attempt's end.
        """
        is_over = self._rounds.view.end is not None and name != "post_result"
        if number == self._rounds.number and not is_over:
            getattr(self, name)(*arguments)

    def join(self, rank: int, node_id: str) -> None:
        """The supervisor of a rank is there."""
        self._rounds.nodes[rank] = node_id
        self._wake()

    async def nodes_of(self, world_size: int, limit_s: float) -> dict[int, str]:
        """The node of each rank, once all have come, or of those that have come after `limit_s`."""
        await self._wait_until(lambda: len(self._rounds.nodes) == world_size, limit_s)
        return dict(self._rounds.nodes)

    async def roll_call(self, world_size: int, limit_s: float) -> list[int]:
        """Ranks whose supervisors have not answered within `limit_s`."""
        self._rounds.call_roll()
        self._wake()
        await self._wait_until(lambda: len(self._rounds.present) == world_size, limit_s)
        return sorted(set(range(world_size)) - self._rounds.present)

    def answer_roll(self, rank: int, roll: int) -> None:
        """See `Rounds.answer_roll`."""
        self._rounds.answer_roll(rank, roll)
        self._wake()

    def use_vaults(self, vaults: Mapping[str, Any]) -> None:
        """See `Rounds.use_vaults`."""
        self._rounds.use_vaults(vaults)
        self._wake()

    def announce_store(self, number: int, host: str, port: int) -> None:
        """See `Rounds.announce_store`."""
        self._rounds.announce_store(number, host, port)
        self._wake()

    def report(self, number: int, report: Report) -> None:
        """See `Rounds.report`."""
        self._rounds.report(number, report)
        self._wake()

    def done(self, number: int, rank: int, world_size: int) -> None:
        """See `Rounds.done`."""
        self._rounds.done(number, rank, world_size)
        self._wake()

    def begin_round(self, order: Order) -> bool:
        """See `Rounds.begin`; the attempt's standing begins anew."""
        has_begun = self._rounds.begin(order)
        if has_begun:
            self._standing, self._failure = Standing(), None
        self._wake()
        return has_begun

    def give_up(self, reason: str) -> None:
        """See `Rounds.give_up`."""
        self._rounds.give_up(reason)
        self._wake()

    async def next_view(self, seen: int) -> View:
        """The view, once it is newer than version `seen`, or as it is after five minutes."""
        await self._wait_until(lambda: self._rounds.view.version > seen)
        return self._rounds.view

    async def next_reports(self, number: int, seen: int, limit_s: float) -> list[Report]:
        """The reports of round `number`, once there are more than `seen`, or as they are after `limit_s`."""
        await self._wait_until(lambda: self._rounds.number != number or len(self._rounds.reports) > seen, limit_s)
        return list(self._rounds.reports) if self._rounds.number == number else []

    def _wake(self) -> None:
        if self._rounds.view.end is not None:
            self._standing.moved_at = None  # nothing moves any more, and nothing hangs
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_until(self, condition: Callable[[], bool], limit_s: float = _LONGEST_WAIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition() and (left_s := deadline - time.monotonic()) > 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)


def new_board() -> Any:
    """Start a board; it takes no CPU from the workers and ends with the driver.

    On the driver's own node: a board on a worker's node would be lost with it, and with it what the driver decides by.
    """
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    options = {"scheduling_strategy": here, "max_concurrency": _CALLS_AT_ONCE}
    return ray.remote(num_cpus=0)(Board).options(**options).remote()
