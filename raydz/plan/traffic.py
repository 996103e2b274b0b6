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
    """

    reduced: int
    gathered: int
    replicated: int = 0

    @property
    def total(self) -> int:
        return self.reduced + self.gathered + self.replicated


def step_traffic(
    units: Sequence[UnitShape],
    groups: Sequence[GroupShape],
    sharding: Sharding,
    each: ElementBytes,
    *,
    accumulation: int,
    replicas: int = 1,
) -> Traffic:
    """What a step sends after the first one, in which the engine does not know yet which unit comes last."""
    ranks = sharding.ranks
    reductions = 1 if sharding.keeps_gradients else accumulation
    reduced = gathered = sums = 0
    for group in groups:
        if group.trainable:
            wire = each.wire or sharding.gradient_bytes(each.of(group))
            reduced += reductions * wire * group.padded_numel
            sums += 4 * sharding.owned(group)
        element = each.of(group).compute if sharding.stage else 4
        gathered += _gathers(group, units, sharding, accumulation) * element * group.padded_numel
    return Traffic(
        reduced=reduced * (ranks - 1) // ranks,
        gathered=gathered * (ranks - 1) // ranks,
        replicated=2 * sums * (replicas - 1) // replicas,
    )


def _gathers(group: GroupShape, units: Sequence[UnitShape], sharding: Sharding, accumulation: int) -> int:
    """How often a step gathers a group: after the update, or for each forward and backward."""
    if sharding.keeps_weights(group):
        return int(group.trainable)
    stays = group.unit in (0, len(units) - 1) or units[group.unit].is_lookup
    return accumulation * (1 if stays else 2)
