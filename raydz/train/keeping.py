"""What becomes of a run's older checkpoints: retention and garbage, after each commit and never in training's way.

Neighbours: `loop.py` opens it on rank 0; `saving.py` calls its hook in a save's thread; `checkpoint/sweep.py` deletes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raydz import log
from raydz.checkpoint import step_folder
from raydz.checkpoint.retention import Rules
from raydz.checkpoint.sweep import Sweeper, SweepPlan

if TYPE_CHECKING:
    from raydz.train.setup import Run

_logger = log.get(__name__)


class RunKeeping:
    """The checkpoints of one run, on rank 0.

    Attributes:
        failures: sweeps so far in which something could not be looked at or deleted; the next one tries again.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._rules = run, Rules.of(run.config.checkpoint)
        self._sweeper = Sweeper(
            run.store, self._rules, sweep_after_s=run.config.checkpoint.sweep_after_s, in_use=self._in_use,
            reads_all=False,
        )  # fmt: skip
        self._told: set[str] = set()
        self.failures = 0

    def committed(self, folder: str) -> None:
        """The hook: delete what no rule keeps. Never raises: a sweep that fails costs space and nothing else."""
        try:
            plan = self._sweeper.plan()
            self._warn(plan, folder)
            swept = self._sweeper.run(plan)
        except Exception as error:
            self._failed(folder, f"{type(error).__name__}: {error}")
            return
        if swept.checkpoints or swept.orphans or swept.num_leftovers:
            fields = {"checkpoints": swept.checkpoints, "orphans": swept.orphans, "leftovers": swept.num_leftovers}
            self._log("checkpoints_removed", {"after": folder, **fields, "bytes": swept.num_bytes})
        if swept.faults:
            self._failed(folder, "; ".join(swept.faults))

    def _in_use(self) -> set[str]:
        """What this run was started from, and what its exports read."""
        run = self._run
        exported = () if run.exports is None else run.exports.steps_in_use()
        started = {run.start.folder} if run.start.store_uri == run.store.uri else set()
        return started | {step_folder(step) for step in exported}

    def _warn(self, plan: SweepPlan, folder: str) -> None:
        """Of a damaged checkpoint, and of a metric that there is not, once each."""
        for found in plan.damaged:
            self._warn_once(found.folder, f"{found.folder} is damaged ({found.fault}) and is left as it is")
        best, metrics = self._rules.best, self._run.metrics
        if best is not None and best.metric not in metrics:
            names = ", ".join(sorted(metrics))
            text = f"checkpoint.keep_best keeps nothing yet: {folder} has no metric {best.metric}, but {names}"
            self._warn_once("keep_best", text)

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            _logger.warning(text)

    def _failed(self, folder: str, error: str) -> None:
        self.failures += 1
        self._warn_once(error, f"older checkpoints were not all removed: {error}")
        self._log("keeping_failed", {"after": folder, "error": error, "failures": self.failures})

    def _log(self, event: str, fields: dict[str, Any]) -> None:
        if self._run.tracker:
            self._run.tracker.log_event(event, fields)


def open_keeping(run: Run) -> RunKeeping | None:
    """Keep house from now on, where the configuration gives a rule or an age; None on other ranks."""
    config = run.config.checkpoint
    if run.engine.world.rank != 0 or (config.keep_last is None and config.sweep_after_s is None):
        return None
    keeping = RunKeeping(run)
    run.after_commit.append(keeping.committed)
    return keeping
