"""Bytes that one rank sends in a step: the Wire note of `zero/README.md`, in bytes.

Neighbours: `memory.py` has the same groups and sharding; `estimate.py` asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raydz.plan.groups import GroupShape
from raydz.plan.memory import ElementBytes, Sharding
from raydz.plan.shapes import UnitShape


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by one rank in one optimizer step.

    Args:
        reduced: gradients to their owners.
        gathered: weights (stage 0: sums of gradients) to everybody.
        replicated: sums between the groups that hold replicas.
        near: weights from the second copy, between near ranks alone.
    """

    reduced: int
    gathered: int
    replicated: int = 0
    near: int = 0

    @property
    def total(self) -> int:
        return self.reduced + self.gathered + self.replicated + self.near


def step_traffic(
    units: Sequence[UnitShape],
    groups: Sequence[GroupShape],
    sharding: Sharding,
    each: ElementBytes,
    *,
    kept: set[int],
    accumulation: int,
    replicas: int = 1,
) -> Traffic:
    """What a step sends after the first one, in which the engine does not know yet which unit comes last.

    Args:
        kept: units that stay gathered from forward to backward.
    """
    ranks = sharding.ranks
    reductions = 1 if sharding.keeps_gradients else accumulation
    reduced = gathered = near = sums = 0
    for group in groups:
        if group.trainable:
            twice = 2 if sharding.by_all_reduce and sharding.stage else 1  # stage 0 gathers the sums anyway
            reduced += twice * reductions * sharding.gradients_sent(group, each)
            sums += 4 * sharding.owned(group)
        message = sharding.weights_sent(group, each) if sharding.stage else 4 * group.padded_numel
        gathers = _gathers(group, units, kept, sharding, accumulation)
        from_near = 0
        if sharding.near and not sharding.keeps_weights(group):  # all but the first one after an update
            from_near = gathers - int(group.trainable)
        gathered += (gathers - from_near) * message
        near += from_near * message
    return Traffic(
        reduced=reduced * (ranks - 1) // ranks,
        gathered=gathered * (ranks - 1) // ranks,
        replicated=2 * sums * (replicas - 1) // replicas,
        near=near * (sharding.near - 1) // sharding.near if sharding.near else 0,
    )


def _gathers(
    group: GroupShape, units: Sequence[UnitShape], kept: set[int], sharding: Sharding, accumulation: int
) -> int:
    """How often a step gathers a group: after the update, or for each forward and backward."""
    if sharding.keeps_weights(group):
        return int(group.trainable)
    stays = group.unit == 0 or group.unit in kept or units[group.unit].is_lookup
    return accumulation * (1 if stays else 2)
