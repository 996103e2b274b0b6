"""Ctrl-C and `ray job stop`: the driver asks for a checkpoint before it ends.

Neighbours: `fit.py` runs each attempt inside `StopSignals`; `board.py` carries the wish; `StopWatch` hears of it on
rank 0; `train/stopping.py` agrees on it with all ranks at the end of a step. See README.md, "Stop".
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import ray

from raydz import log

_logger = log.get(__name__)
T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.5
_MARGIN_S = 3.0
"""Of the time that Ray leaves a job: for telling MLflow, and for leaving."""
_RAY_WAITS_S = 3.0
"""What Ray waits between SIGTERM and SIGKILL unless the job's RAY_JOB_STOP_WAIT_TIME_S says otherwise."""


class StopSignals:
    """SIGINT and SIGTERM of the driver while workers train; as a context manager, in the main thread.

    The first signal asks the workers to save and end; a second one ends the driver at once, and Ray ends its workers.
    In any other thread, and where the program has handlers of its own, signals are left as they are.

    Attributes:
        number: of the signal that came, or None.
        is_urgent: a second one came.
    """

    def __init__(self, *, limit_s: float | None = None) -> None:
        self.number: int | None = None
        self.is_urgent = False
        self._limit_s = time_to_stop() if limit_s is None else limit_s
        self._since = 0.0
        self._ask: Callable[[str], Any] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _SIGNALS}
            self._before = {number: old for number, old in self._before.items() if _is_nobodys(old)}
            for number in self._before:
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)

    def run(self, work: Callable[[], T], ask: Callable[[str], Any]) -> T:
        """Run `work`, and `ask` (with a reason) when a signal comes.

        `work` runs in a thread of its own: Ray Train takes SIGINT for itself in the main thread, and a signal must
        find the main thread free to answer.

        Raises:
            KeyboardInterrupt, SystemExit: the time that Ray leaves the job is over, or a second signal came.
        """
        if not self._before:
            return work()
        done: list[Callable[[], T]] = []
        thread = threading.Thread(target=lambda: done.append(_outcome(work)), name="raydz-attempt", daemon=True)
        self._ask = ask
        if self.number is not None:
            raise self.end()
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL_S)
                if self.number is not None and self._limit_s and time.monotonic() - self._since > self._limit_s:
                    _logger.warning("no checkpoint within the %g s that Ray leaves this job", self._limit_s)
                    raise self.end()
        finally:
            self._ask = None
        return done[0]()

    def check(self) -> None:
        """While no group trains: raise what `end` gives once a signal has come."""
        if self.number is not None:
            raise self.end()

    def end(self) -> BaseException:
        """What to raise at the end, so that the driver's exit code says that it was stopped."""
        assert self.number is not None
        return KeyboardInterrupt() if self.number == signal.SIGINT else SystemExit(128 + self.number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            self.is_urgent = True
            raise self.end()
        self.number, self._since = number, time.monotonic()
        name = signal.Signals(number).name
        _logger.warning("%s: saving a checkpoint at the end of this step; once more ends the run at once", name)
        if self._ask is not None:
            self._ask(name)


def _outcome(work: Callable[[], T]) -> Callable[[], T]:
    """What `work` returned or raised, to be had in another thread."""
    try:
        value = work()
    except BaseException as error:
        caught = error

        def fail() -> T:
            raise caught

        return fail
    return lambda: value


def _is_nobodys(handler: Any) -> bool:
    """Whether a signal has Python's own handler, or the one that `ray.init` sets."""
    is_default = handler in (signal.SIG_DFL, signal.default_int_handler)
    return is_default or str(getattr(handler, "__module__", "")).partition(".")[0] == "ray"


def time_to_stop() -> float:
    """Seconds between a stop and the last moment to leave by oneself; 0: nobody counts."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return 0.0
    try:
        given = float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", _RAY_WAITS_S))
    except ValueError:
        given = _RAY_WAITS_S
    return max(given - _MARGIN_S, min(given, 1.0))


class StopWatch:
    """On rank 0: learns from the board, beside the training, that the driver was asked to stop.

    As a context manager; called, it says why, or None, without waiting.

    Args:
        looks: whether it does; other ranks hear of it from rank 0.
    """

    def __init__(self, board: Any, *, looks: bool) -> None:
        self._board, self._looks = board, looks
        self._reason: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydz-stop", daemon=True)

    def __call__(self) -> str | None:
        return self._reason

    def __enter__(self) -> StopWatch:
        if self._looks:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while self._reason is None and not self._over.wait(_POLL_S):
            try:
                self._reason = ray.get(self._board.stop_reason.remote())
            except Exception as error:  # the driver is gone, and this worker soon too
                _logger.info("the board does not answer: %s", type(error).__name__)
                return
