"""A run's checkpoints: when one begins, what becomes of it, and how many failures are too many.

Neighbours: `loop.py` calls this between steps; `checkpoint/saving.py` saves. What is decided here is decided on all
ranks alike: they compare notes in one small gather a step while a save is in flight.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from raydz import log
from raydz.checkpoint import SaveHandle, checkpoint_uri, step_folder
from raydz.dist.monitor import excused
from raydz.errors import CheckpointError, Superseded
from raydz.train.snapshots import run_state

if TYPE_CHECKING:
    from raydz.train.progress import Progress
    from raydz.train.setup import Run

_logger = log.get(__name__)


class RunSaves:
    """The saves of a run, one at a time.

    Attributes:
        failures: saves so far that failed; `failed_in_row` of them since the last good one.
        skipped: saves left out because the one before was in flight.
    """

    def __init__(self, run: Run, progress: Progress) -> None:
        self._run, self._progress = run, progress
        self._config = run.config.checkpoint
        self._handle: SaveHandle | None = None
        self._waited_s: float | None = None
        self.failures = self.failed_in_row = self.skipped = 0

    def begin(self) -> None:
        """Save the state after `run.step`: in the background, or at once without `checkpoint.async_save`.

        Collective: every rank. Blocking: for the snapshot, and under `checkpoint.in_flight: wait` for the save before.

        Raises:
            CheckpointError: too many failures in a row, or one after the last step.
        """
        is_last = self._run.step == self._run.config.train.steps
        self.poll(wait=is_last or self._config.in_flight == "wait")
        if self._handle is not None:
            self._skip()
        elif self._config.async_save:
            self._handle = self._run.engine.save_async(
                self._run.store, step_folder(self._run.step), step=self._run.step, state=run_state(self._run),
                timeout_s=self._config.timeout_s, after_commit=self._run_hooks,
            )  # fmt: skip
        else:
            self._save_at_once()

    def poll(self, *, wait: bool = False) -> None:
        """Hear of the end of the save in flight, if all ranks have.

        Collective: every rank. Blocking: with `wait` until it has ended.

        Raises:
            CheckpointError: too many failures in a row, or one after the last step.
        """
        handle = self._handle
        if handle is None:
            return
        if wait:
            started = time.perf_counter()
            with excused():
                handle.wait()
            self._add_blocked(started)
        gather = self._run.engine.comms.world.all_gather_values
        words = gather([float(handle.done), float(handle.error is not None)], what="ends of saves")
        if not all(done for done, _ in words):
            return
        self._handle = None
        if words[0][1]:  # rank 0 commits, so its word counts
            self._failed(handle.step, handle.error or CheckpointError("the checkpoint was not saved", where=handle.uri))
        else:
            self._committed(handle.step, handle.total_s or 0.0, handle.blocked_s, handle.total_bytes)

    def figures(self) -> dict[str, float]:
        """Of this step: how long training stood still for saves since the last call, and how many have failed."""
        figures = {"checkpoint_failures": float(self.failures)} if self.failures else {}
        blocked_s, self._waited_s = self._waited_s, None
        engine_s = self._run.engine.take_save_blocked_s()
        if blocked_s is not None or engine_s:
            figures["checkpoint_blocking_s"] = engine_s + (blocked_s or 0.0)
        return figures

    def give_chance(self) -> None:
        """Of a run that ends early: let the save in flight end, within `checkpoint.exit_wait_s`. Not collective."""
        handle = self._handle
        if handle is None:
            return
        self._handle = None
        with excused():
            has_ended = handle.wait(self._config.exit_wait_s)
        if not has_ended:
            handle.is_given_up = True
            _logger.warning("the save of step %d is given up; the checkpoint before it is the newest", handle.step)
            self._log("checkpoint_failed", {"step": handle.step, "error": "the run ended before it was committed"})
        elif handle.error is not None:
            self._log("checkpoint_failed", {"step": handle.step, "error": str(handle.error)})
        else:
            self._committed(handle.step, handle.total_s or 0.0, handle.blocked_s, handle.total_bytes)

    def _add_blocked(self, started: float) -> float:
        elapsed_s = time.perf_counter() - started
        self._waited_s = (self._waited_s or 0.0) + elapsed_s
        return elapsed_s

    # -- one save ------------------------------------------------------------------------------------------------------

    def _save_at_once(self) -> None:
        run, folder, started = self._run, step_folder(self._run.step), time.perf_counter()
        try:
            with excused():
                num_bytes = run.engine.save_to(run.store, folder, step=run.step, state=run_state(self._run))
        except CheckpointError as error:
            self._failed(run.step, error)
            return
        elapsed_s = self._add_blocked(started)
        self._committed(run.step, elapsed_s, elapsed_s, num_bytes)
        if run.engine.world.rank == 0:
            self._run_hooks(folder)

    def _run_hooks(self, folder: str) -> None:
        """On rank 0, after a commit: retention, exports. What they raise ends nothing."""
        for hook in self._run.after_commit:
            try:
                hook(folder)
            except Exception as error:
                _logger.warning("after the checkpoint %s was committed: %s", folder, error)

    def _committed(self, step: int, total_s: float, blocked_s: float, num_bytes: int) -> None:
        run, folder = self._run, step_folder(step)
        self.failed_in_row, run.newest_folder = 0, folder
        uri = checkpoint_uri(run.store, folder)
        self._progress.say(f"checkpoint {uri} ({total_s:.2f} s, {blocked_s:.3f} s of them in training's way)")
        fields = {"step": step, "uri": uri, "seconds": total_s, "blocked_s": blocked_s, "bytes": num_bytes}
        self._log("checkpoint", fields)
        if run.tracker:
            run.tracker.set_tags({"raydz.checkpoint": uri})

    def _failed(self, step: int, error: CheckpointError | Superseded) -> None:
        if isinstance(error, Superseded):
            raise error
        self.failures += 1
        self.failed_in_row += 1
        _logger.error("checkpoint %d not saved (%d in a row):\n%s", step, self.failed_in_row, error)
        self._log("checkpoint_failed", {"step": step, "error": str(error), "in_row": self.failed_in_row})
        if self.failed_in_row >= self._config.max_failures_in_row or step == self._run.config.train.steps:
            raise error

    def _skip(self) -> None:
        self.skipped += 1
        assert self._handle is not None
        _logger.warning("no checkpoint of step %d: that of %d is in flight", self._run.step, self._handle.step)
        self._log("checkpoint_skipped", {"step": self._run.step, "in_flight": self._handle.step})

    def _log(self, event: str, fields: dict[str, Any]) -> None:
        if self._run.tracker:
            self._run.tracker.log_event(event, fields)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the body as an exception, so that what is in flight gets its chance.

    Only in a main thread whose SIGTERM nobody else handles: elsewhere the host (Ray) decides how a process ends.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not is_ours:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        _told.clear()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_told: list[int] = []


def heed_sigterm() -> None:
    """Raise again what SIGTERM raised where nobody could catch it: in a finaliser or a callback of weak references."""
    if _told:
        raise SystemExit(128 + _told[0])


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second one ends at once
    _told.append(number)
    raise SystemExit(128 + number)
