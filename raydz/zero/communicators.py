"""Which process group does what in an engine, and the watch over what its ranks launch.

Neighbours: `engine.py` makes one of its mesh; `sharded.py` hands them to groups and gradients.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch.distributed as dist

from raydz.dist import CommClock, Communicator, Mesh, World
from raydz.dist.monitor import DivergenceMonitor, Waiting, default_store
from raydz.dist.sequence import SequenceLog

_engine_numbers = itertools.count()  # every rank builds its engines in the same order


@dataclass(frozen=True)
class Communicators:
    """Gathers and reductions run over process groups of their own, so that neither queues behind the other.

    Args:
        gather, reduce: of the ranks that share a shard group.
        world: of all ranks.
        waiting: what any of them waits for.
        replica: of the ranks that hold the same shard; None where there is one replica.
        near: of the ranks that keep a second copy of the weights among themselves; None where there is none.
    """

    gather: Communicator
    reduce: Communicator
    world: Communicator
    waiting: Waiting
    replica: Communicator | None = None
    near: Communicator | None = None

    @classmethod
    def over(cls, mesh: Mesh, clock: CommClock, *, ordered: bool) -> Communicators:
        """Those of this rank; `ordered` as of `Communicator`."""
        waiting = Waiting()

        def of(group: dist.ProcessGroup | None, name: str) -> Communicator:
            return Communicator(group, ordered=ordered, clock=clock, name=name, waiting=waiting)

        gather = of(mesh.gather_group, "gathers")
        return cls(
            gather=gather,
            reduce=of(mesh.reduce_group, "reductions"),
            world=gather if mesh.world_group is mesh.gather_group else of(mesh.world_group, "messages"),
            waiting=waiting,
            replica=of(mesh.replica_group, "replica sums") if mesh.replica_group else None,
            near=of(mesh.near_group, "near gathers") if mesh.near_group else None,
        )

    @property
    def logs(self) -> list[SequenceLog]:
        """Of what all ranks that share shards must launch alike."""
        return [self.gather.log, self.reduce.log, *([self.near.log] if self.near else [])]

    def watch(self, world: World, *, limit_s: float) -> DivergenceMonitor:
        """Compare what ranks wait for, and (where all of them share shards) what they launched, until it is stopped."""
        return DivergenceMonitor(
            default_store() if world.world_size > 1 else None,
            f"raydz/divergence/{next(_engine_numbers)}",
            world.rank,
            world.world_size,
            limit_s=limit_s,
            waiting=self.waiting,
            logs=[] if self.replica else self.logs,
        )
