"""What the driver knows of a failure, as the next attempt and `events.jsonl` are told it.

Neighbours: `fit.py` calls these after each failure; `train/recovery.py` adds what the next attempt knows, when it has
made its first step. See README.md, "What a restart tells".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raydz import log
from raydz.errors import StorageError
from raydz.orchestrate.board import Standing
from raydz.orchestrate.failures import Failure
from raydz.orchestrate.policy import GiveUp, Restart
from raydz.tracking import append_event
from raydz.train.recovery import Interruption

_CAUSE_CHARS = 500
_logger = log.get(__name__)


def describe_failure(failure: Failure, decision: Restart | GiveUp, number: int, seen_at: float) -> dict[str, Any]:
    """Fields of the event `failure`; `number` counts the driver's failures from 1."""
    return {
        "number": number, "kind": failure.kind.value, "cause": failure.cause[:_CAUSE_CHARS],
        "error": type(failure.error).__name__ if failure.error is not None else None,
        "failed_step": failure.failed_step, "began_at_step": failure.began_at_step, "seen_at": round(seen_at, 3),
        "decision": "restart" if isinstance(decision, Restart) else "give up", "reason": decision.reason[:_CAUSE_CHARS],
    }  # fmt: skip


def interrupted(
    before: Interruption | None, event: dict[str, Any], standing: Standing, board_now: float, workers: int = 0
) -> Interruption:
    """The interruption that began with this failure, or the one that goes on: an attempt without a step ended none.

    Args:
        before: what the failed attempt was to end.
        event: of `describe_failure`.
        standing, board_now: as the board gave them when the failure was seen; one clock, so `detect_s` is exact.
        workers: of the failed attempt.
    """
    why = f"{event['kind']}: {event['cause']}"
    if before is not None and standing.step is None:
        return replace(before, failures=(*before.failures, event), why=why)
    last_step = standing.step if standing.step is not None else int(event["began_at_step"])
    detect_s = _since_last_sign(standing, board_now)
    trained = workers if standing.step is not None else 0
    return Interruption((event,), last_step, detect_s, float(event["seen_at"]), trained, why)


def planned(why: str, standing: Standing, board_now: float, workers: int) -> Interruption:
    """The interruption that began with a stop that was asked for; the save before it is part of `detect_s`."""
    assert standing.step is not None, "a stop is agreed on at the end of a step"
    return Interruption((), standing.step, _since_last_sign(standing, board_now), time.time(), workers, why)


def _since_last_sign(standing: Standing, board_now: float) -> float:
    moments = (standing.step_at, standing.began_at, standing.created_at)
    return max(0.0, board_now - next(at for at in moments if at is not None))


def tell(run_dir: Path, event: Mapping[str, Any]) -> None:
    """Write the event `failure` from here: the workers are gone.

    Where the run's folder is on another host, rank 0 of the next attempt writes it; a run that is given up has it in
    the driver's log and, as its error, in MLflow.
    """
    log.event("failure", event)
    try:
        is_told = append_event(run_dir, "failure", event)
    except StorageError as error:
        _logger.error("the event failure cannot be written:\n%s", error)
        return
    if not is_told:
        _logger.info("the run's folder %s is not on this host: the next attempt records the failure", run_dir)
