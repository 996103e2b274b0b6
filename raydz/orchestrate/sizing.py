"""How many workers a run may have, has room for, and should be changed to: pure functions, tested without a cluster.

Neighbours: `capacity.py` knows what is free; `attempts.py` asks before each attempt, `growth.py` during one. See
README.md, "Elastic workers".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from raydz.config import Config
from raydz.dist.mesh import MeshShape
from raydz.errors import ConfigError

Resources = Mapping[str, float]

_SLACK = 1e-6
"""Ray counts in ten-thousandths; sums of floats are not exact."""


def allowed_sizes(config: Config) -> tuple[int, ...]:
    """Numbers of workers that the run may have, in order: those within its range that its shard groups divide.

    Raises:
        ConfigError: the batch cannot be cut for one of them, or shard groups do not divide the fewest or the most.
    """
    scaling, engine = config.scaling, config.engine()
    sizes = []
    for workers in range(scaling.min_workers, scaling.max_workers + 1):
        try:
            MeshShape.for_world(
                workers, shard_size=engine.shard_size, near_size=engine.zero_optimization.zero_hpz_partition_size
            )
        except ConfigError:
            if scaling.is_elastic and workers in (scaling.min_workers, scaling.max_workers):
                raise
            if not scaling.is_elastic:
                raise
            continue
        engine.batch(workers)
        sizes.append(workers)
    return tuple(sizes)


def places_on(free: Resources, per_worker: Resources) -> int | None:
    """Workers that one node has room for; None: any number, since a worker takes nothing."""
    counts = [math.floor(free.get(name, 0.0) / amount + _SLACK) for name, amount in per_worker.items() if amount > 0]
    return max(0, min(counts)) if counts else None


def places(free: Mapping[str, Resources], per_worker: Resources, most: int) -> int:
    """Workers that the nodes have room for, `most` at most; a worker does not spread over nodes.

    Args:
        free: by node.
    """
    total = 0
    for node in free.values():
        room = places_on(node, per_worker)
        if room is None:
            return most
        total += room
    return min(total, most)


def largest(allowed: Sequence[int], room: int) -> int | None:
    """The most workers that are allowed and have room; None if not even the fewest have."""
    return max((size for size in allowed if size <= room), default=None)


def steps_up(allowed: Sequence[int], size: int) -> list[int]:
    """What each next size has more than the one before it: 2, 4, 6 from 2 on are two steps of 2."""
    above = [size, *(other for other in allowed if other > size)]
    return [after - before for before, after in pairwise(above)]


@dataclass(frozen=True)
class Training:
    """How a group gets on.

    Args:
        trained_s: since its first step ended; None: none has.
        left_s: to the run's last step, by the median of its steps; None: not known yet.
    """

    trained_s: float | None
    left_s: float | None


def is_worth_growing(training: Training, grow_after_s: float) -> bool:
    """A larger group costs a restart: this one has trained for a while, and there is enough left to gain from it."""
    if training.trained_s is None or training.trained_s < grow_after_s:
        return False
    return training.left_s is None or training.left_s >= grow_after_s


class Growth:
    """When to grow: the room for it was the same at two looks in a row, or is all that can be used.

    Nodes of one request come within seconds of each other, and each resize is a restart.
    """

    def __init__(self, allowed: Sequence[int], size: int) -> None:
        self._allowed, self._size = allowed, size
        self._seen = size

    def look(self, extra: int) -> int | None:
        """The size to change to, or None.

        Args:
            extra: workers that there is room for beside those that train.
        """
        size = largest(self._allowed, self._size + extra) or self._size
        is_steady, self._seen = size == self._seen, size
        return size if size > self._size and (is_steady or size == self._allowed[-1]) else None
