"""What happens after an attempt failed: pure functions of what is known, tested without a cluster.

Neighbours: `fit.py` asks after every failure and does what the decision says; `failures.py` names the kinds.
See README.md, "After a failure".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raydz.config.cluster import FailureConfig
from raydz.errors import RaydzError
from raydz.orchestrate.failures import Failure, Kind

_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Restart:
    """Start a new group.

    Args:
        pause_s: before that; grows while groups do not even start.
        skips: steps whose batches are left out from now on.
        before_step: begin at the newest checkpoint before this step; None: at the newest.
    """

    reason: str
    pause_s: float = 0.0
    skips: frozenset[int] = frozenset()
    before_step: int | None = None


@dataclass(frozen=True)
class GiveUp:
    """End the run with `error`, or with a new one that says `reason`."""

    reason: str
    error: RaydzError | None = None


_FREE = (Kind.NODE_DRAINED, Kind.NO_ROOM)
"""Kinds that say nothing about the run: no budget counts them."""
_POISON = (Kind.EXCEPTION, Kind.ERROR, Kind.KILLED, Kind.OUT_OF_MEMORY, Kind.HANG)
"""Kinds that a batch may cause."""


def decide(failures: Sequence[Failure], config: FailureConfig) -> Restart | GiveUp:
    """Restart after what a restart may mend, within the budget; the last of `failures` is the newest.

    In this order: a bad checkpoint and a step that fails again and again have policies of their own; a typed error that
    a restart cannot mend ends the run; so does the failure that exceeds the budget of the last `window_s`.
    """
    newest = failures[-1]
    if newest.kind is Kind.BAD_CHECKPOINT:
        return _after_bad_checkpoint(failures, config)
    in_row = _same_step_in_row(failures)
    if newest.kind in _POISON and in_row >= config.max_at_same_step:
        return _after_poison(newest, in_row, config)
    if newest.error is not None and not newest.error.retryable:
        return GiveUp("a restart cannot mend this error", newest.error)
    counted = [
        failure for failure in failures if failure.kind not in _FREE and newest.at - failure.at < config.window_s
    ]
    if len(counted) > config.max_failures:
        period = f"within {config.window_s:g} s" if len(counted) < len(failures) else "in all"
        reason = f"{len(counted)} failures {period}, {config.max_failures} are forgiven (failure.max_failures)"
        return GiveUp(reason, newest.error)
    budget = f"failure {len(counted)} of at most {config.max_failures}" if counted else "a planned end"
    return Restart(f"{budget}: {newest.kind.value}: {newest.cause}", pause_s=_pause(failures))


def _after_bad_checkpoint(failures: Sequence[Failure], config: FailureConfig) -> Restart | GiveUp:
    newest = failures[-1]
    if config.on_bad_checkpoint == "stop":
        return GiveUp("the checkpoint is damaged (failure.on_bad_checkpoint is stop)", newest.error)
    bad = sum(failure.kind is Kind.BAD_CHECKPOINT for failure in failures)
    if bad > config.max_failures or newest.began_at_step == 0:
        return GiveUp("no checkpoint that can be loaded is left", newest.error)
    return Restart(
        f"the checkpoint of step {newest.began_at_step} is damaged, an older one is taken (failure.on_bad_checkpoint)",
        before_step=newest.began_at_step,
    )


def _after_poison(newest: Failure, in_row: int, config: FailureConfig) -> Restart | GiveUp:
    step = newest.failed_step
    if config.on_poison == "skip":
        return Restart(
            f"step {step} failed {in_row} times in a row and is left out (failure.on_poison)", skips=frozenset({step})
        )
    reason = f"step {step} failed {in_row} times in a row: look at its batch, or set failure.on_poison to skip"
    return GiveUp(f"{reason} ({newest.kind.value}: {newest.cause})", newest.error)


def _same_step_in_row(failures: Sequence[Failure]) -> int:
    """How many of the newest failures came at one step; what a batch cannot cause does not interrupt the row."""
    wanted, count = failures[-1].failed_step, 0
    for failure in reversed(failures):
        if failure.kind not in _POISON:
            continue
        if failure.failed_step != wanted:
            break
        count += 1
    return count


def _pause(failures: Sequence[Failure]) -> float:
    """None after a first failure to start, then 2, 4, 8 … seconds; a crash while training is restarted at once."""
    starts = 0
    for failure in reversed(failures):
        if failure.kind not in (Kind.NO_START, Kind.NO_ROOM):
            break
        starts += 1
    return 0.0 if starts < 2 else min(2.0 ** (starts - 1), _LONGEST_PAUSE_S)
