"""What of the cluster is free now, and claims on more: pending placement groups, which an autoscaler sees.

Neighbours: `attempts.py` waits with a claim for room for a group; `growth.py` holds claims while a group trains.
`sizing.py` counts. See README.md, "Elastic workers".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from raydz import log
from raydz.config import Config
from raydz.orchestrate.drain import draining_nodes
from raydz.orchestrate.sizing import Resources, largest, places

_LOOK_S = 0.5
_QUIET_S = 5.0
"""What has just been given back, by the task before or the last group, shows within this time."""
_SAY_EVERY_S = 60.0
_MOST_PENDING = 32
"""Claims that wait at a time: Ray tries each again whenever something changes."""
_logger = log.get(__name__)


def free_by_node() -> dict[str, Resources]:
    """What is free on each node that lives and is not about to go."""
    leaving = draining_nodes()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving}
    return {node: free for node, free in available_resources_per_node().items() if node in alive}


class Claims:
    """Placement groups beside the one of the workers; each that is placed holds its room until it is released.

    They end with the driver, too.
    """

    def __init__(self, per_worker: Resources) -> None:
        self._per_worker = {name: amount for name, amount in per_worker.items() if amount > 0}
        self._groups: list[tuple[PlacementGroup, int]] = []

    def want(self, parts: Sequence[int]) -> None:
        """Claim room for groups of workers of these sizes, each placed whole or not at all; some of them at a time."""
        missing = list(parts)
        for _, workers in self._groups:
            if workers in missing:
                missing.remove(workers)
        waiting = sum(not _is_placed(group) for group, _ in self._groups)
        for workers in missing[: max(0, _MOST_PENDING - waiting)]:
            self._groups.append((placement_group([dict(self._per_worker)] * workers, strategy="PACK"), workers))

    @property
    def placed(self) -> int:
        """Workers whose room is held."""
        return sum(workers for group, workers in self._groups if _is_placed(group))

    def release(self) -> None:
        """Give up all of them."""
        while self._groups:
            remove_placement_group(self._groups.pop()[0])

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _is_placed(group: PlacementGroup) -> bool:
    return placement_group_table(group)["state"] == "CREATED"  # `wait(0)` says no now and then


class Room:
    """Finds out, before an attempt, how many workers it can have.

    Args:
        allowed: of `sizing.allowed_sizes`.
        check: called while waiting; may raise.
    """

    def __init__(self, config: Config, per_worker: Resources, allowed: Sequence[int], check: Callable[[], Any]) -> None:
        self._scaling, self._per_worker, self._allowed, self._check = config.scaling, per_worker, allowed, check

    def choose(self, before: int | None = None) -> int:
        """The number of workers to start now.

        Args:
            before: workers of the last attempt, for whom room is waited for a while; None: there was none.

        Blocking: with a range, until there is room for the fewest.
        """
        if not self._scaling.is_elastic:
            return self._scaling.max_workers
        size, wanted = self._now(), before or self._allowed[-1]
        if size is None or size < wanted:
            patience_s = _QUIET_S if before is None else self._scaling.shrink_after_s
            size = self._wait_for(wanted, patience_s) or self._now() or self._wait_for(self._allowed[0], None)
        assert size is not None
        if before not in (None, size):
            _logger.warning("going on with %d workers, %s before", size, before)
        return size

    def _now(self) -> int | None:
        return largest(self._allowed, places(free_by_node(), self._per_worker, self._allowed[-1]))

    def _wait_for(self, workers: int, limit_s: float | None) -> int | None:
        """Claim room for them together; these or more, where more came with them, or None after the limit."""
        started = time.monotonic()
        say_at = started + _QUIET_S
        with Claims(self._per_worker) as claims:
            claims.want([workers])
            while limit_s is None or time.monotonic() - started < limit_s:
                self._check()
                if claims.placed:
                    claims.release()
                    time.sleep(_LOOK_S)  # until what is free shows
                    return max(workers, self._now() or 0)
                if time.monotonic() > say_at:
                    say_at = time.monotonic() + _SAY_EVERY_S
                    _logger.warning("no room for %d workers of %s: waiting for nodes", workers, dict(self._per_worker))
                time.sleep(_LOOK_S)
        return None
