"""What the publisher asks of the place where points go, and how patiently it asks.

Layer 3. `tracking.mlflow.MlflowSink` is the sink of a real run; `tracking.publisher` is the only caller.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from raydz.tracking.journal import Point


class Sink(Protocol):
    """Where points go. Every method may block or raise; only the publisher's thread calls them."""

    def connect(self) -> int:
        """Open or reopen the run. Returns the largest step it holds, -1 if none. Called again after it raised.

        Raises:
            ConfigError: it can never succeed; the publisher stops.
        """

    def publish(self, points: Sequence[Point]) -> None:
        """Store points, in order of steps; repeating a call whose outcome is unknown must do no harm."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or replace tags of the run."""

    def log_text(self, name: str, text: str) -> None:
        """Store a small text beside the run."""

    def finish(self, status: str, error: str | None) -> None:
        """Close the run with a status."""


@dataclass(frozen=True)
class Pace:
    """How often to publish, how much at once, and how long to wait after failures (doubling, with jitter)."""

    interval_s: float = 5.0
    batch_points: int = 50
    retry_min_s: float = 1.0
    retry_max_s: float = 60.0


class Backoff:
    """Waits that double up to a limit, each drawn from its upper half so that many jobs don't return at once."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._failures = pace, 0

    def next_s(self) -> float:
        """The wait after one more failure."""
        limit = min(self._pace.retry_max_s, self._pace.retry_min_s * 2 ** min(self._failures, 30))
        self._failures += 1
        return limit * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """After a success."""
        self._failures = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0
