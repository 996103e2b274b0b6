"""Whether updates begin before the norm is known: a running estimate of how often that is in vain. Pure arithmetic.

Layer 3. `pipeline.py` asks before each step and tells what became of it. README.md, "Exact clipping and overlap".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Mode = Literal["auto", "waiting", "speculative"]
_MEMORY = 0.125  # weight of the newest step
_FIRST_STEPS = 3  # of which a plain mean is made: one step is no habit


@dataclass(frozen=True)
class Judgement:
    """What past steps say.

    Args:
        rollback_rate: estimate of how many steps change the factor that the gradients are multiplied by.
        ahead_s: of a step's updates, those that speculation makes before the norm is known.
        residue_s: how long a rollback waits for the update that is under way.
        num_steps: seen so far.
    """

    mode: Mode = "auto"
    rollback_rate: float = 0.0
    ahead_s: float = 0.0
    residue_s: float = 0.0
    num_steps: int = 0

    @property
    def break_even(self) -> float:
        """The rate above which speculation loses: time won by a step that holds over time won and lost."""
        both = self.ahead_s + self.residue_s
        return 1.0 if not both else self.ahead_s / both

    @property
    def pays(self) -> bool:
        """Whether the next step shall speculate."""
        if self.mode != "auto":
            return self.mode == "speculative"
        return self.num_steps < _FIRST_STEPS or self.rollback_rate < min(self.break_even, 1 - _MEMORY / 2)

    @property
    def _weight(self) -> float:
        return max(_MEMORY, 1 / (self.num_steps + 1))

    def rate_with(self, rolled_back: bool) -> float:
        """The estimate with one more step."""
        return _moved(self.rollback_rate, float(rolled_back), self._weight)

    def after(self, rolled_back: bool, ahead_s: float | None, residue_s: float | None) -> Judgement:
        """The judgement with one more step; times are None where nothing was tried."""
        weight = self._weight
        return replace(
            self,
            rollback_rate=self.rate_with(rolled_back),
            ahead_s=_moved(self.ahead_s, ahead_s, weight),
            residue_s=_moved(self.residue_s, residue_s, weight),
            num_steps=self.num_steps + 1,
        )


@dataclass(frozen=True)
class OffloadStep:
    """How the update of one step went.

    Args:
        mode: whether it began before the norm was known.
        rolled_back: the norm changed the factor that all had been foreseen with, tried or not.
        rollback_rate: how often that happens, this step included.
        waits_s: what the training thread waited for since the step before, by cause.
        updating_s: what the updates took since then, in their own thread.
        ahead_s: of this step's, what was made before the norm was known.
    """

    mode: Literal["waiting", "speculative"]
    rolled_back: bool
    rollback_rate: float
    waits_s: dict[str, float]
    updating_s: float
    ahead_s: float


def with_waits(step: OffloadStep | None, waits_s: dict[str, float]) -> OffloadStep | None:
    """The same with further waits; None where nothing is offloaded."""
    if step is None:
        return OffloadStep("waiting", False, 0.0, waits_s, 0.0, 0.0) if waits_s else None
    return replace(step, waits_s=step.waits_s | waits_s)


def _moved(old: float, new: float | None, weight: float) -> float:
    return old if new is None else old + (new - old) * weight
