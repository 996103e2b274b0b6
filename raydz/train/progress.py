"""What a person sees while a run trains: a bar in a terminal, plain lines in a job's log.

Neighbours: `loop.py` calls this on rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType

from raydz import log
from raydz.units import format_bytes, format_count

_logger = log.get(__name__)


def describe_step(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """One line of a step's figures."""
    parts = [f"step {step}/{total}", f"loss {metrics['loss']:.4f}"]
    parts += [f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("eval_loss")]
    parts += [
        f"lr {metrics['lr']:.2e}",
        f"grad norm {metrics['grad_norm']:.3f}",
        f"{metrics['step_time_s']:.3f} s",
        f"{format_count(metrics['tokens_per_s'])} tokens/s",
        f"comm {metrics['comm_share']:.0%}",
        f"peak {format_bytes(metrics['memory_peak_bytes'])}",
    ]
    return " | ".join(parts)


class Progress:
    """A bar where standard error is a terminal; a line every `log_every` steps and at evaluations elsewhere."""

    def __init__(self, total: int, done: int, log_every: int, is_shown: bool) -> None:
        self._total, self._log_every, self._is_shown = total, log_every, is_shown
        self._bar = None
        if is_shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell of a finished step."""
        if not self._is_shown:
            return
        line = describe_step(step, self._total, metrics)
        if self._bar:
            self._bar.update(self._task, completed=step, description=line.partition(" | ")[2])
        elif step % self._log_every == 0 or step == self._total or "eval_loss" in metrics:
            _logger.info(line)

    def say(self, text: str) -> None:
        """A line of its own: a sample, a checkpoint."""
        if not self._is_shown:
            return
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            _logger.info(text)
