"""Ray Train's controller, in a process that waits for the next attempt with its imports done.

Neighbours: `attempts.py` keeps a `Standby` over all attempts of a run and starts each one with a `Trainer`. Reaches
into Ray Train 2.60, which pyproject.toml pins: `_initialize_and_run_controller` and what it does. See README.md, "A
restart".
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray.exceptions import RayActorError
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.result import Result
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydz import log

_LOOK_S = 2.0
_ANSWER_S = 30.0
_logger = log.get(__name__)


class Controller(TrainController):
    """Is a controller from `begin` on; before that, a process."""

    def __init__(self) -> None:
        pass

    def begin(self, **given: Any) -> None:
        """Be what Ray Train's own would be from its start."""
        super().__init__(**given)


class Standby:
    """The driver's: at most one controller that waits, on the driver's node."""

    def __init__(self) -> None:
        self._waiting: Any = None

    @contextmanager
    def beside(self, board: Any) -> Iterator[None]:
        """Start the next attempt's controller once this one has trained a step: it takes a core for some seconds."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(board, over), name="raydz-standby", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_ANSWER_S)

    def begin(self, **given: Any) -> Any:
        """The one that waits, or a new one, once it has begun."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            try:
                ray.get(waiting.begin.remote(**given))
            except RayActorError as error:
                _logger.debug("the controller that waited has gone: %s", error)
            else:
                return waiting
        controller = _new_controller()
        ray.get(controller.begin.remote(**given))
        return controller

    def close(self) -> None:
        """End the one that waits."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            with suppress(Exception):  # the cluster may be gone
                ray.kill(waiting)

    def _watch(self, board: Any, over: threading.Event) -> None:
        while self._waiting is None and not over.wait(_LOOK_S):
            try:
                standing, _ = ray.get(board.glance.remote(), timeout=_ANSWER_S)
                if standing.first_step_at is not None:
                    self._waiting = _new_controller()
            except Exception as error:  # the next attempt starts its own
                _logger.debug("no controller waits: %s", error)


def _new_controller() -> Any:
    """As Ray Train starts its own."""
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    variables = {RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR: "0", **get_env_vars_to_propagate()}
    options = {"scheduling_strategy": here, "runtime_env": {"env_vars": variables}}
    return ray.remote(num_cpus=0)(Controller).options(**options).remote()


class Trainer(DataParallelTrainer):
    """Ray Train's, with a controller of `standby`."""

    def __init__(self, standby: Standby, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._standby = standby

    def _initialize_and_run_controller(self, **given: Any) -> Result:
        controller = self._standby.begin(**given)
        if threading.current_thread() is threading.main_thread():
            self._register_sigint_handler(controller)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())
