"""Where workers leave what the driver must know: the run's result, and the first typed error.

Neighbours: `worker.py` posts, `fit.py` reads. An actor, because Ray Train wraps exceptions in text and returns only
metrics.
"""

from __future__ import annotations

from typing import Any

import ray

from raydz.errors import RaydzError
from raydz.train import Result


class Board:
    """One for each attempt, owned by the driver."""

    def __init__(self) -> None:
        self._result: Result | None = None
        self._failure: RaydzError | None = None

    def post_result(self, result: Result) -> None:
        """Rank 0 is done."""
        self._result = result

    def post_failure(self, error: RaydzError) -> None:
        """A rank met a typed error; the first one counts."""
        self._failure = self._failure or error

    def failure(self) -> RaydzError | None:
        """The failure, if there was one."""
        return self._failure

    def result(self) -> Result | None:
        """The result, if rank 0 came to an end."""
        return self._result


def new_board() -> Any:
    """Start a board; it takes no CPU from the workers and ends with the driver."""
    return ray.remote(num_cpus=0)(Board).remote()
