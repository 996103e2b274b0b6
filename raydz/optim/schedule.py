"""Learning-rate schedules as pure functions of the number of committed steps, with DeepSpeed's names and formulas.

Neighbours: `engine.py` asks for `lr(step)` before each step. Nothing is stored: a skipped step does not advance the
schedule, and a resumed run continues where the step count says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from raydz.errors import ConfigError
from raydz.optim.cycle import Betas, LRRangeTest, OneCycle


class Schedule(Protocol):
    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 1."""

    def betas(self, step: int) -> Betas | None:
        """Betas of that step, where the schedule moves them; None leaves the optimizer's own."""


class RateOnly:
    """A schedule that leaves the betas alone."""

    def betas(self, step: int) -> Betas | None:
        return None


@dataclass(frozen=True)
class Constant(RateOnly):
    """The optimizer's own rate, always."""

    value: float

    def lr(self, step: int) -> float:
        return self.value


def _warmup_ratio(iteration: int, num_steps: int, kind: str) -> float:
    return math.log(iteration + 1) / math.log(num_steps) if kind == "log" else iteration / num_steps


@dataclass(frozen=True)
class WarmupLR(RateOnly):
    """Rise from `warmup_min_lr` to `warmup_max_lr`, then stay.

    As in DeepSpeed the first two steps run at the minimum: its scheduler stands at iteration -1 during the first
    step and at 0 during the second. Source: DeepSpeed `lr_schedules.py`, class WarmupLR.
    """

    warmup_min_lr: float
    warmup_max_lr: float
    warmup_num_steps: int
    warmup_type: str = "log"

    def lr(self, step: int) -> float:
        iteration = step - 2
        if iteration < 0:
            return self.warmup_min_lr
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * self._gamma(iteration)

    def _gamma(self, iteration: int) -> float:
        num_steps = max(2, self.warmup_num_steps)
        return _warmup_ratio(iteration, num_steps, self.warmup_type) if iteration < num_steps else 1.0


@dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linear to the minimum at `total_num_steps`. Source: DeepSpeed, class WarmupDecayLR."""

    total_num_steps: int = 0

    def _gamma(self, iteration: int) -> float:
        num_steps = max(2, self.warmup_num_steps)
        if iteration < num_steps:
            return super()._gamma(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1.0, self.total_num_steps - num_steps))


@dataclass(frozen=True)
class WarmupCosineLR(RateOnly):
    """Rise from `warmup_min_ratio` to 1, then half a cosine to `cos_min_ratio`, times the optimizer's rate.

    Source: DeepSpeed, class WarmupCosineLR (which runs the very first step at rate 0).
    """

    base_lr: float
    total_num_steps: int
    warmup_min_ratio: float
    warmup_num_steps: int
    cos_min_ratio: float
    warmup_type: str = "log"

    def lr(self, step: int) -> float:
        return self.base_lr * self._ratio(step - 2)

    def _ratio(self, iteration: int) -> float:
        num_steps = max(2, self.warmup_num_steps)
        if iteration < 0:
            return 0.0
        if iteration < num_steps:
            rise = _warmup_ratio(iteration, num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * rise
        progress = (iteration - num_steps + 1) / max(1, self.total_num_steps - num_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine


def build_schedule(name: str | None, params: Mapping, base_lr: float) -> Schedule:
    """Build a schedule from DeepSpeed's `scheduler` section; None is constant.

    Raises:
        ConfigError: the type is not known.
    """
    if name is None:
        return Constant(base_lr)
    given = {key: value for key, value in params.items() if value is not None}
    if name in ("WarmupLR", "WarmupDecayLR"):
        highest = base_lr if name == "WarmupLR" else 1e-3  # DeepSpeed's defaults differ
        given = {"warmup_min_lr": 0.0, "warmup_max_lr": highest, "warmup_num_steps": 1000} | given
        return WarmupLR(**given) if name == "WarmupLR" else WarmupDecayLR(**given)
    if name == "WarmupCosineLR":
        defaults = {"warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 1e-4}
        return WarmupCosineLR(base_lr=base_lr, **(defaults | given))
    if name in ("LRRangeTest", "OneCycle"):
        return LRRangeTest(**given) if name == "LRRangeTest" else OneCycle(**given)
    raise ConfigError(
        "unknown schedule", where="scheduler.type", got=name,
        wanted="WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest or OneCycle",
    )  # fmt: skip
