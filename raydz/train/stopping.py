"""A run that is asked to stop: how all ranks hear of it at the end of the same step.

Neighbours: `loop.py` sends the word of each rank along with its loss, saves and leaves; `orchestrate/stop.py` is who
asks under Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Asked = Callable[[], str | None]
"""Why this rank was asked to stop, or None; called once a step, so it must not wait."""

PLANNED = ("resize", "node drained")
"""First words of reasons that end this group of workers and not the run: another group goes on at once."""


def goes_on(reason: str | None) -> bool:
    """Whether a stop for this reason (`<word>: <more>`) is one of `PLANNED`."""
    return reason is not None and reason.partition(":")[0] in PLANNED


class StopRequest:
    """Asked for on any rank, agreed on by all.

    Attributes:
        is_agreed: the same on every rank after every step.
        reason: on a rank that was asked.
    """

    def __init__(self, asked: Asked | None = None) -> None:
        self._asked = asked
        self.reason: str | None = None
        self.is_agreed = False

    def word(self) -> float:
        """1.0 if this rank was asked to stop, for the gather of the step's losses."""
        if self._asked is not None and self.reason is None:
            self.reason = self._asked()
        return float(self.reason is not None)

    def hear(self, words: Iterable[float]) -> None:
        """Take note of every rank's word."""
        self.is_agreed = any(words)
