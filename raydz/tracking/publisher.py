"""Carries the journal to a sink from a thread of its own, so that the training thread never waits for it.

Layer 3. `tracking.tracker` appends to `tracking.journal` and tells this thread; `tracking.sink` says what a sink is.
The journal is the queue: memory is bounded by one batch however long the sink is away. The position is kept by the
sink itself (`Sink.connect` says which steps it holds): no second record that could disagree with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raydz import log
from raydz.errors import ConfigError
from raydz.tracking.credentials import first_line
from raydz.tracking.journal import JournalTail, Point
from raydz.tracking.notes import Notes
from raydz.tracking.sink import Backoff, Pace, Sink

_log = log.get(__name__)
_NO_STEP = -1


@dataclass(frozen=True)
class Ending:
    """How the run ends (None: it goes on), and until when (time.monotonic) the thread may try to say so."""

    status: str | None
    error: str | None
    deadline: float


class Publisher:
    """The thread. Everything but `flush` and `close` returns at once, whatever the sink does.

    Ownership: one publisher a journal. The thread is a daemon: a sink that blocks for ever cannot hold up an exit.
    """

    def __init__(self, journal_path: Path, sink: Sink, pace: Pace | None = None) -> None:
        self._sink, self._pace = sink, pace or Pace()
        self._tail = JournalTail(journal_path)
        self._backoff, self._notes = Backoff(self._pace), Notes(self._pace)
        self._last_step: int | None = None  # None: not connected yet
        self._baseline: Point | None = None
        self._waiting_lines = 0
        self._ending: Ending | None = None
        self._is_done = False
        self._has_tried_to_end = False
        self._wake = threading.Event()
        self._rounds = threading.Condition()
        self._asked = self._answered = 0
        self._failures = 0
        self.refusal: ConfigError | None = None
        """Why the sink can never work; the thread has ended then."""
        self._thread = threading.Thread(target=self._loop, name="raydz-publisher", daemon=True)
        self._thread.start()

    # ---- called by the training thread

    @property
    def failures(self) -> int:
        """Calls of the sink that failed so far."""
        return self._failures + self._notes.failures

    def line_added(self) -> None:
        """A step was appended to the journal; wakes the thread when a batch is full and the sink is well."""
        self._waiting_lines += 1  # a race with the thread's reset only moves a wake-up by a few lines
        if self._waiting_lines >= self._pace.batch_points and not self._backoff.is_failing:
            self._wake.set()

    def set_baseline(self, point: Point) -> None:
        """Publish this point, which is not in the journal, ahead of all steps, if the sink is not past its step."""
        self._baseline = point
        self._wake.set()

    def annotate(self, tags: Mapping[str, str] | None = None, texts: Mapping[str, str] | None = None) -> None:
        """Set tags and store texts at the next round."""
        self._notes.add(tags or {}, texts or {})

    def flush(self, timeout_s: float) -> bool:
        """Wait until the thread has tried to publish everything up to now.

        Blocking: at most `timeout_s`; shorter when the sink fails at once.

        Returns:
            Whether it was tried and nothing is wrong.
        """
        with self._rounds:
            self._asked += 1
            asked = self._asked
            self._wake.set()
            tried = self._rounds.wait_for(lambda: self._answered >= asked or self._is_done, timeout_s)
        return tried and not self._backoff.is_failing and self.refusal is None

    def close(self, timeout_s: float, status: str | None, error: str | None = None) -> int:
        """Publish the rest, close the run with a status (None: leave it open) and end the thread.

        Blocking: at most `timeout_s`.

        Returns:
            How many points were left in the journal; the next start of the run publishes them.
        """
        self._ending = Ending(status, error, time.monotonic() + timeout_s)
        self._wake.set()
        self._thread.join(timeout_s)
        if not self._is_done or self._backoff.is_failing:
            _log.warning("tracking: the end (%s) could not be sent within %.0f s", status or "pause", timeout_s)
        if unsent := self._notes.names:
            _log.warning("tracking: never stored: %s", ", ".join(unsent))
        return self._tail.count(self._held_step())

    # ---- the thread

    def _loop(self) -> None:
        while not self._is_done:
            asked = self._asked
            wait_s = self._round()
            with self._rounds:
                self._answered = asked
                self._rounds.notify_all()
            if not self._is_done:
                self._wake.wait(wait_s)
                self._wake.clear()

    def _round(self) -> float:
        """Try everything once. Returns how long to wait for the next time."""
        ending = self._ending
        if ending is not None and self._has_tried_to_end and time.monotonic() >= ending.deadline:
            self._is_done = True  # `close` has returned and said what is left: nothing may follow
            return 0.0
        self._has_tried_to_end = ending is not None
        try:
            if self._last_step is None:
                self._last_step = self._sink.connect()
            self._publish_points()
            self._notes.send(self._sink, is_last=ending is not None)
            if ending is not None and ending.status is not None:
                self._sink.finish(ending.status, ending.error)
        except ConfigError as refusal:
            return self._refused(refusal)
        except Exception as error:
            return self._failed(error, ending)
        if self._backoff.is_failing:
            _log.info("tracking works again after %d failures; the journal was replayed", self._failures)
        self._backoff.reset()
        self._is_done = ending is not None
        return self._pace.interval_s

    def _publish_points(self) -> None:
        if self._baseline is not None:
            self._publish([self._baseline])
        self._waiting_lines = 0
        is_behind = True
        while is_behind:
            points, offset = self._tail.read(self._pace.batch_points, self._held_step())
            self._publish(points)
            self._tail.offset = offset
            is_behind = len(points) == self._pace.batch_points

    def _publish(self, points: list[Point]) -> None:
        if points and points[-1].step > self._held_step():
            self._sink.publish(points)
            self._last_step = points[-1].step

    def _held_step(self) -> int:
        return _NO_STEP if self._last_step is None else self._last_step

    def _failed(self, error: Exception, ending: Ending | None) -> float:
        self._failures += 1
        if not self._backoff.is_failing:
            _log.warning("tracking fails; training goes on, the journal keeps every step: %s", first_line(error))
        wait_s = self._backoff.next_s()
        if ending is None:
            return wait_s
        left_s = ending.deadline - time.monotonic()
        self._is_done = left_s <= 0
        return max(0.0, min(wait_s, left_s))

    def _refused(self, refusal: ConfigError) -> float:
        self._failures += 1
        self.refusal = refusal
        self._is_done = True
        _log.error("tracking cannot work as configured; only the journal is kept:\n%s", refusal)
        return 0.0
