"""What happens after a worker group failed: pure functions of what is known, tested without a cluster.

Neighbours: `fit.py` asks after every failure and does what the decision says.
"""

from __future__ import annotations

from dataclasses import dataclass

from raydz.errors import RaydzError


@dataclass(frozen=True)
class Restart:
    """Start a new group, which continues from the newest checkpoint."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """End the run with `error`, or with a new one that says `reason`."""

    reason: str
    error: RaydzError | None = None


def decide(num_failures: int, max_failures: int, error: RaydzError | None, cause: str) -> Restart | GiveUp:
    """Restart after what a restart may mend, within the budget.

    Args:
        num_failures: of this run so far, this one included.
        max_failures: how many are forgiven.
        error: what a rank said before it died, if it was a typed error.
        cause: one line about the failure.
    """
    if error is not None and not error.retryable:
        return GiveUp("a restart cannot mend this error", error)
    if num_failures > max_failures:
        return GiveUp(f"{num_failures} failures, {max_failures} are forgiven (failure.max_failures)", error)
    return Restart(f"failure {num_failures} of at most {max_failures}: {cause}")
