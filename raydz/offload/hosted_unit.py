"""A unit whose update runs in host memory: where it is in its step, and what decides the update.

Layer 3. `pipeline.py` moves units from stage to stage; README.md, "A unit's step", has the picture.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from raydz.offload.links import REACHED, Mark
from raydz.offload.tiers import UnitShape
from raydz.optim import Optimizer, Update


class Stage(Enum):
    """Where a unit is in its step."""

    REST = "rest"
    """The device has the newest weights, or they are on their way in a stream."""
    ARRIVED = "arrived"
    """Its gradient is in host memory, or on its way."""
    TRYING = "trying"
    TRIED = "tried"
    """Updated in the second buffers, with the factor that was foreseen."""
    DUE = "due"
    UPDATING = "updating"
    UPDATED = "updated"
    SENDING = "sending"


@dataclass(frozen=True)
class StepPlan:
    """All that decides a step's update besides gradients and states; equal plans give equal bits."""

    optimizer: Optimizer
    now: Update


Advance = Callable[[int, dict[str, Tensor], Tensor, StepPlan, "dict[str, Tensor] | None"], None]
"""(unit, tensors, gradient, plan, second) -> None: one step of the unit, in place or into `second`."""


@dataclass(eq=False)
class HostedUnit:
    """One unit at run time.

    Args:
        weights: (numel,) on the device, what forward reads; None: that is fetched from host memory or a disk.
        keep: puts the newest weights where they are fetched from, if that is not the tier.
        then: the stage after TRYING, once it is decided.
        is_awaited: the current stream has been told to wait for the newest weights.
    """

    shape: UnitShape
    weights: Tensor | None
    keep: Callable[[Tensor], None] | None = None
    gradient: Tensor | None = None
    stage: Stage = Stage.REST
    then: Stage = Stage.TRIED
    arrived: Mark = REACHED
    landed: Mark = REACHED
    is_awaited: bool = True


@dataclass
class Waits:
    """Seconds that the training thread waited, by cause, and what the updates took."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, cause: str, since: float) -> None:
        self.seconds[cause] = self.seconds.get(cause, 0.0) + time.perf_counter() - since

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken
