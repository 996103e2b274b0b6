"""In the driver, beside an attempt whose workers supervise: decides what a rank's end means, and begins the next round.

Neighbours: `attempts.py` starts one beside each attempt; `policy.py` decides, as after the end of a group; the board
tells the supervisors. See README.md, "In place".
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

from raydz import log
from raydz.config import Config
from raydz.errors import RaydzError
from raydz.orchestrate.board import Standing
from raydz.orchestrate.failures import Failure, Kind, classify
from raydz.orchestrate.interruption import describe_failure, interrupted, tell
from raydz.orchestrate.policy import Restart, decide
from raydz.orchestrate.rounds import Order, Report, most_telling
from raydz.orchestrate.vault import Vaults
from raydz.orchestrate.watchdog import Watchdog
from raydz.orchestrate.worker import WorkerTask

_LOOK_S = 1.0
_ECHO_S = 3.0
"""A rank that lost its peers waits so long for the peer's own word, which says why."""
_ROLL_S = 3.0
"""A supervisor that has not answered by then has gone, with its node or alone."""
_ANSWER_S = 30.0
_logger = log.get(__name__)


def failure_of(report: Report, standing: Standing, hang: str | None, at: float) -> Failure:
    """What a report comes to. Pure.

    Args:
        hang: what the watchdog found, if it ended this rank.
        at: now, by the clock of the run's other failures.
    """
    error: RaydzError | None = None if report.error is None else pickle.loads(report.error)
    if report.kind == "raised":
        kind, cause = classify(Exception(report.cause), error, had_begun=standing.began is not None)
    else:
        kind, cause = Kind(report.kind), report.cause
    if hang is not None:
        kind, cause = Kind.HANG, hang
    began = next((step for step in (standing.began, standing.chose) if step is not None), 0)
    return Failure(kind, at, standing.step, began, cause, error)


class Referee:
    """A thread of the driver; as a context manager around an attempt.

    Args:
        failures: of the run so far; those that are mended in place are added.
        task: of this attempt.
        size: workers of this attempt.
        vaults: where snapshots in memory are kept, too.

    Attributes:
        given_up: the failure after which the attempt was ended; it is not yet among `failures`.
    """

    def __init__(
        self, board: Any, watchdog: Watchdog, failures: list[Failure], task: WorkerTask, size: int,
        vaults: Vaults | None = None,
    ) -> None:  # fmt: skip
        self._board, self._watchdog, self._failures, self._size = board, watchdog, failures, size
        self._task, self._vaults = task, vaults
        self._config: Config = task.config
        self._round = 0
        self.given_up: Failure | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydz-referee", daemon=True)

    def __enter__(self) -> Referee:
        if self._config.failure.in_place:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_S)

    def carry(self, task: WorkerTask) -> WorkerTask:
        """The task with what the rounds of this attempt have changed, for the attempt after it."""
        mine = self._task
        return replace(
            task, number=mine.number, skips=mine.skips, before_step=mine.before_step, interruption=mine.interruption
        )

    def forget_unfinished(self, standing: Standing) -> None:
        """Of a group that ended while a round was on its way: one fault, seen twice, is one failure."""
        if self._round and standing.began is None and self.given_up is None:
            self._failures.pop()

    def _watch(self) -> None:
        while not self._over.is_set() and self.given_up is None:
            try:
                self._open_vaults()
                reports = self._reports(0, _LOOK_S)
                if reports:
                    self._judge(*self._cause(reports))
            except Exception as error:  # the board ends with the cluster, and then so does the attempt
                if self._over.is_set():
                    return
                _logger.warning("no restart in place: %s: %s", type(error).__name__, error)
                self._over.wait(_LOOK_S)

    def _open_vaults(self) -> None:
        """Once all supervisors have come: one vault on each of their nodes."""
        if self._vaults is None or not self._config.failure.memory_snapshot_every:
            return
        nodes = ray.get(self._board.nodes_of.remote(self._size, 0.0), timeout=_ANSWER_S)
        if len(nodes) == self._size:
            ray.get(self._board.use_vaults.remote(self._vaults.on(nodes.values())), timeout=_ANSWER_S)
            self._vaults = None

    def _reports(self, seen: int, limit_s: float) -> list[Report]:
        return ray.get(self._board.next_reports.remote(self._round, seen, limit_s), timeout=_ANSWER_S)

    def _cause(self, reports: list[Report]) -> tuple[Report, list[int]]:
        """The report that tells most, and, where it is an echo, the ranks whose supervisors have gone."""
        deadline = time.monotonic() + _ECHO_S
        if not most_telling(reports).is_echo:
            return most_telling(reports), []
        gone = ray.get(self._board.roll_call.remote(self._size, _ROLL_S), timeout=_ANSWER_S)
        while not gone and most_telling(reports).is_echo and (left_s := deadline - time.monotonic()) > 0:
            reports = self._reports(len(reports), left_s)
        return most_telling(reports), gone

    def _loss_of(self, gone: list[int], echo: Failure) -> Failure:
        """What the end of supervisors comes to; Ray may not know yet that their nodes have died."""
        nodes = ray.get(self._board.nodes_of.remote(self._size, 0.0), timeout=_ANSWER_S)
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        kind = Kind.NODE_LOST if any(nodes.get(rank) not in alive for rank in gone) else Kind.KILLED
        cause = f"the workers of ranks {', '.join(map(str, gone))} have gone"
        return replace(echo, kind=kind, cause=cause, error=None)

    def _judge(self, report: Report, gone: list[int]) -> None:
        """Decide as after the end of a group; a restart is a round, unless supervisors have gone."""
        (standing, now), stop_reason = ray.get(
            [self._board.glance.remote(), self._board.stop_reason.remote()], timeout=_ANSWER_S
        )
        failure = failure_of(report, standing, self._watchdog.take_found(), time.monotonic())
        if gone:
            failure = self._loss_of(gone, failure)
        failures = [*self._failures, failure]
        decision = decide(failures, self._config.failure)
        if not isinstance(decision, Restart) or stop_reason is not None or gone:
            self.given_up = failure
            ray.get(self._board.give_up.remote(failure.cause), timeout=_ANSWER_S)
            return
        self._failures.append(failure)
        event = {**describe_failure(failure, decision, len(failures), time.time()), "in_place": True}
        interruption = interrupted(self._task.interruption, event, standing, now, self._size)
        self._task = replace(
            self._task, number=self._task.number + 1, skips=self._task.skips | decision.skips,
            before_step=decision.before_step, interruption=interruption,
        )  # fmt: skip
        _logger.warning("restarting in place from the newest snapshot or checkpoint: %s", decision.reason)
        self._begin_round(decision.pause_s)
        tell(Path(self._config.run.root) / str(self._config.run.name), event)

    def _begin_round(self, pause_s: float) -> None:
        self._over.wait(pause_s)
        task = self._task
        assert task.interruption is not None
        told: Mapping[str, Any] = asdict(task.interruption)
        order = Order(self._round + 1, task.number, task.skips, task.before_step, told)
        if ray.get(self._board.begin_round.remote(order), timeout=_ANSWER_S):
            self._round = order.number
