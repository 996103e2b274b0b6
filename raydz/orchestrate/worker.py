"""What runs on every Ray Train worker: the training loop, and word to the driver of how it ended.

Neighbours: `fit.py` hands this to Ray Train, which has set up the process group; `train/loop.py` does the work;
`board.py` takes result and errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import ray.train

from raydz import log
from raydz.config import Config
from raydz.dist import init_world
from raydz.dist.monitor import print_and_exit, set_end
from raydz.errors import RaydzError, TrainingError
from raydz.train import run_training
from raydz.train.build import LossFunction, ModelFunction


@dataclass(frozen=True)
class WorkerTask:
    """What a worker is told; travels to it by Ray's serialiser."""

    config: Config
    model: ModelFunction | None
    loss: LossFunction | None
    board: Any


def _tell_and_exit(task: WorkerTask, error: TrainingError) -> None:
    """End of a rank whose main thread waits for peers that will never come: the driver hears why."""
    ray.get(task.board.post_failure.remote(error), timeout=10)
    print_and_exit(error)


def train_worker(settings: dict[str, Any]) -> None:
    """Train on this rank; Ray Train calls it once a worker and again in new processes after a restart.

    Whatever is raised ends the group: Ray Train sees it at its next poll and kills the other workers, which may wait
    for this one in a collective. A typed error goes to the board first, so that the driver knows it as it was.
    """
    task: WorkerTask = settings["task"]
    rank = ray.train.get_context().get_world_rank()
    log.setup(rank)
    config = task.config
    set_end(lambda error: _tell_and_exit(task, error))
    threads = config.train.threads
    try:
        world = init_world(
            config.train.device,
            timeout_s=config.parallel.collective_timeout_s,
            threads=max(1, int(config.scaling.cpus_per_worker)) if threads == "auto" else threads,
        )
        result = run_training(config, world, model=task.model, loss=task.loss)
        if rank == 0:
            ray.get(task.board.post_result.remote(result))
    except RaydzError as error:
        ray.get(task.board.post_failure.remote(error))
        raise
