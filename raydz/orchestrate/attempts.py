"""One worker group after another until the run is at its end: what is started, what ended it, what comes next.

Neighbours: `fit.py` calls `train_to_the_end`; `policy.py` decides after failures, `capacity.py` how many workers there
are; `watchdog.py` and `growth.py` look on while a group trains. See README.md, "A restart" and "Elastic workers".
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from ray.train.v2.api.config import FailureConfig

from raydz import log
from raydz.config import Config
from raydz.errors import RaydzError, TrainingError
from raydz.orchestrate.board import Standing, new_board
from raydz.orchestrate.capacity import Room
from raydz.orchestrate.controller import Standby, Trainer
from raydz.orchestrate.drain import DrainWatch
from raydz.orchestrate.failures import Failure, Kind, classify
from raydz.orchestrate.growth import GrowthWatch
from raydz.orchestrate.interruption import describe_failure, interrupted, planned, tell
from raydz.orchestrate.policy import GiveUp, decide
from raydz.orchestrate.referee import Referee
from raydz.orchestrate.sizing import allowed_sizes
from raydz.orchestrate.stop import StopSignals
from raydz.orchestrate.supervisor import SupervisedBackend, supervise
from raydz.orchestrate.vault import Vaults
from raydz.orchestrate.watchdog import Watchdog
from raydz.orchestrate.worker import WorkerTask, supervised, train_worker
from raydz.train import Result
from raydz.train.stopping import goes_on

_logger = log.get(__name__)


@dataclass(frozen=True)
class Ended:
    """An attempt that came to an end by itself.

    Args:
        planned: why another group is to go on; None: the run is over.
        wanted: workers that there is room for now, if that is why.
    """

    result: Result
    planned: str | None
    wanted: int | None


class GivenUp(Exception):
    """No further attempt; `error` is what the run ends with, raised from what ended the last attempt."""

    def __init__(self, error: RaydzError) -> None:
        super().__init__(error.what)
        self.error = error


class Attempts:
    """The run's attempts, as `policy.decide` and the room in the cluster have them.

    Args:
        task: what is the same for all workers of all attempts.
        resources: of one worker.
    """

    def __init__(self, task: WorkerTask, resources: dict[str, float], signals: StopSignals) -> None:
        self._task, self._resources, self._signals = task, resources, signals
        self._config = task.config
        self._allowed = allowed_sizes(self._config)
        self._room = Room(self._config, resources, self._allowed, signals.check)
        self._failures: list[Failure] = []
        self._size: int | None = None
        self._vaults = Vaults()
        self._standby = Standby()

    def run(self) -> Result:
        """Attempt after attempt.

        Raises:
            GivenUp: more failures than are forgiven.
        """
        try:
            while True:
                size = self._size = self._room.choose(self._size)
                board = new_board()
                self._task = replace(self._task, board=board, token=uuid.uuid4().hex)
                ended = self._attempt(board, size)
                if ended is not None and ended.planned is None:
                    return ended.result
                if ended is not None:
                    self._go_on(board, size, ended)
                self._task = replace(self._task, number=self._task.number + 1)
        finally:
            self._standby.close()
            self._vaults.close()

    def _attempt(self, board: Any, size: int) -> Ended | None:
        """One group; None if it failed and another one is to be started."""
        try:
            with (
                Watchdog(board, self._config.failure) as watchdog,
                DrainWatch(board),
                self._standby.beside(board),
                GrowthWatch(board, self._config, self._resources, self._allowed, size) as growth,
                Referee(board, watchdog, self._failures, self._task, size, self._vaults) as referee,
            ):
                self._signals.run(self._trainer(size).fit, board.ask_to_stop.remote)
        except Exception as error:
            if self._signals.number is not None:
                raise
            self._failed(error, board, watchdog, referee, size)
            return None
        self._task = referee.carry(self._task)
        fields, reason = ray.get([board.result.remote(), board.stop_reason.remote()])
        if fields is None:
            raise TrainingError("the workers ended without a result", where=f"run {self._config.run.name}")
        result = Result(**fields)
        is_planned = result.status == "stopped" and self._signals.number is None and goes_on(reason)
        return Ended(result, reason if is_planned else None, growth.wanted)

    def _failed(self, error: Exception, board: Any, watchdog: Watchdog, referee: Referee, size: int) -> None:
        """Take note of a failure, and prepare the next attempt as is decided.

        Raises:
            GivenUp: there is none.
        """
        config, task = self._config, referee.carry(self._task)
        standing, board_now = ray.get(board.standing.remote())
        referee.forget_unfinished(standing)
        self._failures.append(referee.given_up or _failure(error, board, watchdog, standing))
        decision = decide(self._failures, config.failure)
        event = describe_failure(self._failures[-1], decision, len(self._failures), time.time())
        tell(Path(config.run.root) / str(config.run.name), event)
        if isinstance(decision, GiveUp):
            raise GivenUp(decision.error or _given_up(config, error, decision)) from error
        _logger.warning("restarting from the newest checkpoint: %s", decision.reason)
        interruption = interrupted(task.interruption, event, standing, board_now, size)
        self._task = replace(
            task, skips=task.skips | decision.skips, before_step=decision.before_step, interruption=interruption
        )
        time.sleep(decision.pause_s)

    def _go_on(self, board: Any, size: int, ended: Ended) -> None:
        """After a planned end: nothing was lost, and no budget counts it."""
        standing, board_now = ray.get(board.standing.remote())
        _logger.info("the group has saved and ended (%s); another one goes on", ended.planned)
        interruption = planned(str(ended.planned), standing, board_now, size)
        self._task = replace(self._task, before_step=None, interruption=interruption)
        self._size = ended.wanted or size

    def _trainer(self, size: int) -> Trainer:
        config, has_gpu = self._config, "GPU" in self._resources
        waits = 0 if config.scaling.is_elastic else -1  # without room for so many: another size, or for ever
        timeout_s = int(config.parallel.collective_timeout_s)
        backend = TorchConfig(backend="nccl" if has_gpu else "gloo", timeout_s=timeout_s)
        in_place = config.failure.in_place
        return Trainer(
            self._standby,
            supervise if in_place else train_worker,
            train_loop_config={"task": supervised(self._task) if in_place else self._task},
            backend_config=SupervisedBackend() if in_place else backend,
            scaling_config=ScalingConfig(num_workers=size, use_gpu=has_gpu, resources_per_worker=dict(self._resources)),
            run_config=RunConfig(
                name=str(config.run.name),
                storage_path=str(Path(config.run.root) / str(config.run.name) / "ray"),
                # retries are ours: see `policy.py`
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=waits),
            ),
        )


def _failure(error: Exception, board: Any, watchdog: Watchdog, standing: Standing) -> Failure:
    """What is known of an attempt that ended with `error`."""
    said = ray.get(board.failure.remote())
    kind, cause = classify(error, said, had_begun=standing.began is not None)
    if watchdog.found is not None:
        kind, cause = Kind.HANG, watchdog.found
    began = next((step for step in (standing.began, standing.chose) if step is not None), 0)
    return Failure(kind, time.monotonic(), standing.step, began, cause, said)


def _given_up(config: Config, error: Exception, decision: GiveUp) -> RaydzError:
    return TrainingError(
        f"run {config.run.name} was given up",
        where=type(error).__name__,
        got=_last_line(error),
        wanted=decision.reason,
        remedy="the workers' tracebacks are above; the same command continues from the newest checkpoint",
    )


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)
