"""What a failure or a change of the number of workers cost: from the last step before it to the first one after it.

Neighbours: `orchestrate/interruption.py` says what went before; `setup.py` makes a `RecoveryWatch` on rank 0 and
`loop.py` asks it after each step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from raydz.tracking import Tracker, read
from raydz.tracking.events import EVENTS_NAME

PHASES = ("detect", "start", "load", "first_step")
"""Last step -> failure seen by the driver -> worker's train function -> checkpoint loaded -> first step ended."""
_ENDS = ("recovered", "resized", "moved")
"""Events of the first step after an interruption: by a failure, to another number of workers, to other nodes."""


@dataclass(frozen=True)
class Interruption:
    """A failure, several without a step between them, or a planned stop, that this attempt is to end.

    Args:
        failures: one event each, as `failure` in `events.jsonl`; none where the stop was planned.
        last_step: the last one that was done before.
        detect_s: from that step's end (or, without one, the last sign of progress) until the driver saw the failure.
        seen_at: when that was; Unix time of the driver's host.
        workers: the ranks of the group that was interrupted; 0: not known.
        why: the number may be another one now.
    """

    failures: tuple[dict[str, Any], ...]
    last_step: int
    detect_s: float
    seen_at: float
    workers: int = 0
    why: str = ""


@dataclass(frozen=True)
class Recovery:
    """A restart that is over.

    Args:
        restarts: of the run so far.
        lost_steps: of the run so far: trained, and gone with a failure.
        phases_s: seconds of each of `PHASES`, of this restart.
    """

    restarts: int
    lost_steps: int
    phases_s: dict[str, float]

    @property
    def total_s(self) -> float:
        """Training stood still for so long."""
        return sum(self.phases_s.values())

    def as_metrics(self) -> dict[str, float]:
        """Rows of `raydz.tracking.METRICS`."""
        phases = {f"recovery_s/{name}": seconds for name, seconds in self.phases_s.items()}
        counts = {"restarts": float(self.restarts), "lost_steps": float(self.lost_steps)}
        return counts | {"recovery_s": self.total_s} | phases


def recovery_of(
    interruption: Interruption, began_at_step: int, times: tuple[float, float, float], earlier: Mapping[str, Any]
) -> Recovery:
    """What the interruption cost.

    Args:
        began_at_step: of the checkpoint that was loaded.
        times: Unix times at which the worker's train function was entered, the checkpoint loaded, the first step done;
            hosts whose clocks differ can make a phase 0, never negative.
        earlier: the run's newest event of `_ENDS`, or {}.
    """
    marks = (interruption.seen_at, *times)
    spans = [max(0.0, after - before) for before, after in pairwise(marks)]
    return Recovery(
        restarts=int(earlier.get("restarts", 0)) + len(interruption.failures),
        lost_steps=int(earlier.get("lost_steps", 0)) + max(0, interruption.last_step - began_at_step),
        phases_s=dict(zip(PHASES, [interruption.detect_s, *spans], strict=True)),
    )


def untold(failures: Iterable[dict[str, Any]], events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The failures that are not among a run's events: the driver could not reach the folder they are in."""
    told = {event.get("seen_at") for event in events if event.get("event") == "failure"}
    return [failure for failure in failures if failure["seen_at"] not in told]


class RecoveryWatch:
    """On rank 0: waits for the first step after an interruption, and tells what the interruption cost."""

    def __init__(
        self, tracker: Tracker, interruption: Interruption, began_at_step: int, times: tuple[float, float],
        earlier: Mapping[str, Any], world_size: int | None = None,
    ) -> None:  # fmt: skip
        self._tracker, self._interruption, self._began_at_step = tracker, interruption, began_at_step
        self._times, self._earlier, self._world_size = times, earlier, world_size
        self._metrics: dict[str, float] = {}

    def step_ended(self, step: int) -> dict[str, float]:
        """Metrics of what was measured at the first step, whose events are written here.

        Every later step has them, too: MLflow may hold the first ones already, from the attempt that failed, and takes
        no step twice.
        """
        if self._metrics:
            return self._metrics
        recovery = recovery_of(self._interruption, self._began_at_step, (*self._times, time.time()), self._earlier)
        phases = {name: round(seconds, 3) for name, seconds in recovery.phases_s.items()}
        where = {"step": step, "from_step": self._began_at_step}
        cost = {
            "restarts": recovery.restarts, "lost_steps": recovery.lost_steps,
            "recovery_s": {**phases, "total": round(recovery.total_s, 3)},
        }  # fmt: skip
        before, failures = self._interruption.workers, self._interruption.failures
        if failures:
            kinds = {"kind": failures[-1]["kind"], "failures": len(failures)}
            kinds["in_place"] = all(failure.get("in_place", False) for failure in failures)
            self._tracker.log_event("recovered", {**where, **kinds, **cost})
        if before and self._world_size not in (None, before):
            sizes = {"from": before, "to": self._world_size, "why": self._interruption.why}
            self._tracker.log_event("resized", {**where, **sizes, **cost})
        elif not failures:
            self._tracker.log_event("moved", {**where, "why": self._interruption.why, **cost})
        self._metrics = recovery.as_metrics()
        return self._metrics


def watch_recovery(
    tracker: Tracker, run_dir: Path, interruption: Interruption, began_at_step: int, times: tuple[float, float],
    world_size: int | None = None,
) -> RecoveryWatch:  # fmt: skip
    """Record the failures that the driver could not, and the newest one as a tag of the MLflow run; on rank 0.

    Args:
        times: as in `recovery_of`, without the first step's.
        world_size: ranks of this attempt; where the interrupted one had others, that is an event.
    """
    events = read(run_dir / EVENTS_NAME)
    for failure in untold(interruption.failures, events):
        tracker.log_event("failure", failure)
    failed_attempt = max(0, sum(event.get("event") == "start" for event in events) - 2)
    for newest in interruption.failures[-1:]:
        tracker.set_tags({f"raydz.attempt.{failed_attempt}.failure": f"{newest['kind']}: {newest['cause']}"})
    counted = (event for event in reversed(events) if event.get("event") in _ENDS)
    earlier: dict[str, Any] = next(counted, {})
    return RecoveryWatch(tracker, interruption, began_at_step, times, earlier, world_size)
