"""Where a rank is: among all ranks, on its node, in the cluster. Free of torch.

Neighbours: workers and supervisors make these; `beats.py` and `child.py` are told.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Seat:
    """A place in the cluster.

    Args:
        node_id: Ray's.
        host: the node's address for the others.
        memory: file descriptors of the memory for snapshots, the same in worker and rank; none: there is none.
    """

    place: Place
    node_id: str
    host: str
    memory: tuple[int, ...] = ()
