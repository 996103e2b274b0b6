"""Snapshots in memory, between checkpoints: what a restart in place goes on from, so that few steps are lost.

Neighbours: `loop.py` calls this after each step, `setup.py` at the start; `checkpoint/memory.py` copies;
`orchestrate/supervisor.py` owns the memory. Checkpoints in the store stay the truth. See README.md, "Snapshots".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from raydz import log
from raydz.checkpoint import step_folder
from raydz.checkpoint.manifest import ITEM_BYTES
from raydz.checkpoint.memory import MemorySnapshots, Moment
from raydz.storage.memory_slot import IMAGE_OFFSET
from raydz.tracking.memory import memory_bytes
from raydz.units import format_bytes

if TYPE_CHECKING:
    from raydz.train.setup import Run

_logger = log.get(__name__)


class RunSnapshots:
    """Of one run, on every rank."""

    def __init__(self, run: Run, snapshots: MemorySnapshots) -> None:
        self._run, self._snapshots = run, snapshots
        self._every = run.config.failure.memory_snapshot_every
        self._is_checked = False

    def step_ended(self, step: int) -> None:
        """Begin one if it is due. Collective: every rank, after the same steps."""
        if step % self._every or step >= self._run.config.train.steps:
            return
        if not self._is_checked and not self._fits():
            self._run.snapshots = None
            return
        self._run.engine.snapshot(self._snapshots, step=step, state=run_state(self._run))

    def _fits(self) -> bool:
        """Whether every rank has the memory; told once where one has not. Collective."""
        self._is_checked = True
        world = self._run.engine.world
        pieces, snapshots = self._run.engine.held_pieces(), self._snapshots
        size = sum((piece.stop - piece.start) * ITEM_BYTES[piece.dtype] for piece in pieces)
        wanted = snapshots.num_slots * (size + IMAGE_OFFSET)
        try:
            free = memory_bytes()[1] // world.local_world_size
        except OSError:
            free = wanted  # what is free cannot be told on this system
        rows = self._run.engine.comms.world.all_gather_values([float(wanted), float(free)], what="room for snapshots")
        short = [(rank, row) for rank, row in enumerate(rows) if row[0] > row[1]]
        if not short:
            return True
        rank, (needed, there) = short[0][0], short[0][1]
        text = (
            f"rank {rank} has {format_bytes(int(there))} of host memory left for snapshots that take "
            f"{format_bytes(int(needed))}: a restart begins at the newest checkpoint (failure.memory_snapshot_every)"
        )
        if self._run.tracker:
            _logger.warning(text)
            self._run.tracker.log_event("memory_snapshots_off", {"rank": rank, "wanted": needed, "free": there})
        return False


def run_state(run: Run) -> dict[str, Any]:
    """What a checkpoint or snapshot of a run holds beside tensors."""
    return {
        "train": {"tokens_seen": run.tokens_seen, "spikes": run.spikes.state() if run.spikes else None},
        "data": run.feed.order.state(run.step),
        "rng": {"seed": run.config.run.seed, "rule": "every step seeds from (seed, step, rank)"},
        "config": run.config.model_dump(mode="json"),
        "resumed_from": run.start.source,
        "mlflow_run_id": run.tracker.mlflow_run_id if run.tracker else None,
        "metrics": run.metrics,
    }


def newest_everywhere(run: Run, snapshots: MemorySnapshots) -> Moment | None:
    """The newest snapshot that every rank has, if it is not older than the newest checkpoint.

    Collective: every rank.
    """
    mine = snapshots.usable(run.engine.held_pieces())
    rows = run.engine.comms.world.all_gather_bytes(json.dumps(mine).encode())
    common = set.intersection(*({(step, start) for step, start in json.loads(row)} for row in rows))
    newest = max(common, default=None)
    return newest if newest is not None and newest[0] >= run.start.step else None


def is_saved(run: Run) -> bool:
    """Whether the run's newest checkpoint is of the step it stands at."""
    return run.newest_folder == step_folder(run.step)


def open_snapshots(run: Run) -> RunSnapshots | None:
    """Take snapshots from now on, where the configuration asks for it and something outlives this process."""
    every, snapshots = run.config.failure.memory_snapshot_every, run.attempt.memory
    if not every:
        return None
    if snapshots is None:
        if run.tracker:
            _logger.warning("failure.memory_snapshot_every has no effect here: it needs raydz.fit and failure.in_place")
        return None
    return RunSnapshots(run, snapshots)
