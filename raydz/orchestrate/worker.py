"""What runs on every Ray Train worker without `failure.in_place`: the training loop, and word of how it ended.

Neighbours: `attempts.py` hands this to Ray Train, which has set up the process group; `train/loop.py` does the work;
`board.py` takes result and errors. With `failure.in_place` it is `supervisor.py` and `child.py` instead.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
import ray.train
from ray import cloudpickle

from raydz import log
from raydz.config import Config
from raydz.dist import init_world
from raydz.dist.monitor import print_and_exit, set_end
from raydz.errors import RaydzError, Superseded, TrainingError
from raydz.orchestrate.beats import Beats
from raydz.orchestrate.gauges import Gauges
from raydz.orchestrate.host_watch import watching
from raydz.orchestrate.place import Place
from raydz.orchestrate.stop import StopWatch
from raydz.orchestrate.supervisor import SupervisorTask
from raydz.train import run_training
from raydz.train.attempt import Attempt
from raydz.train.build import LossFunction, ModelFunction
from raydz.train.recovery import Interruption


@dataclass(frozen=True)
class WorkerTask:
    """What a worker is told; travels to it by Ray's serialiser."""

    config: Config
    model: ModelFunction | None
    loss: LossFunction | None
    board: Any
    token: str = ""
    number: int = 0
    skips: frozenset[int] = frozenset()
    before_step: int | None = None
    interruption: Interruption | None = None


def supervised(task: WorkerTask) -> SupervisorTask:
    """The same for workers that run their rank in a process of its own (`supervisor.py`)."""
    config, packed = task.config, cloudpickle.dumps(replace(task, board=None))
    return SupervisorTask(
        task.board, str(config.run.name), config.tracking.log_json, packed, config.failure, task.number
    )


def torch_threads(config: Config) -> int:
    """Of one rank."""
    threads = config.train.threads
    return max(1, int(config.scaling.cpus_per_worker)) if threads == "auto" else threads


def _tell_and_exit(task: WorkerTask, error: TrainingError) -> None:
    """End of a rank whose main thread waits for peers that will never come: the driver hears why."""
    with suppress(Exception):  # of a driver that is gone, or cannot be reached
        ray.get(task.board.post_failure.remote(error), timeout=10)
    print_and_exit(error)


def _attempt(task: WorkerTask, beats: Beats, stop: StopWatch, entered_at: float, *, tells: bool) -> Attempt:
    """What the loop is told of this attempt; rank 0 tells the board how far it is, without waiting."""

    def chose(step: int) -> None:
        if tells:
            task.board.post_chose.remote(step)

    def began(step: int) -> None:
        if tells:
            task.board.post_began.remote(step)

    def ended_step(step: int) -> None:
        beats.step = step
        if tells:
            task.board.post_step.remote(step)

    attempt = Attempt(
        task.number, task.skips, task.before_step, chose, began, ended_step, stop, interruption=task.interruption,
        entered_at=entered_at,
    )  # fmt: skip
    return replace(attempt, measured=Gauges(str(task.config.run.name))) if tells else attempt


def train_worker(settings: dict[str, Any]) -> None:
    """Train on this rank; Ray Train calls it once a worker and again in new processes after a restart.

    Whatever is raised ends the group: Ray Train sees it at its next poll and kills the other workers, which may wait
    for this one in a collective. A typed error goes to the board first, so that the driver knows it as it was.
    """
    entered_at = time.time()
    task: WorkerTask = settings["task"]
    context = ray.train.get_context()
    rank = context.get_world_rank()
    config = task.config
    log.setup(rank, as_json=config.tracking.log_json)
    set_end(lambda error: _tell_and_exit(task, error))
    try:
        world = init_world(
            config.train.device,
            timeout_s=config.parallel.collective_timeout_s,
            threads=torch_threads(config),
        )
        place = Place(rank, world.world_size, context.get_local_rank(), context.get_local_world_size())
        post, node_id = task.board.post_beats.remote, ray.get_runtime_context().get_node_id()
        with (
            watching(task.board, place, config.failure),
            Beats(post, place, task.token, node_id) as beats,
            StopWatch(task.board, looks=rank == 0) as stop,
        ):
            attempt = _attempt(task, beats, stop, entered_at, tells=rank == 0)
            result = run_training(config, world, model=task.model, loss=task.loss, attempt=attempt)
        if rank == 0:
            ray.get(task.board.post_result.remote(asdict(result)))
    except Superseded as error:
        _tell_and_exit(task, error)  # the group that this worker belonged to may be long gone
    except RaydzError as error:
        ray.get(task.board.post_failure.remote(error))
        raise
