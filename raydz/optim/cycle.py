"""The two schedules of DeepSpeed that look for a rate instead of ending a training: LRRangeTest and OneCycle.

Neighbours: `schedule.py` has the others and builds all five. Source: DeepSpeed `lr_schedules.py`, after Smith 2018,
"A disciplined approach to neural network hyper-parameters: Part 1".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from raydz.errors import ConfigError

Betas = tuple[float, float]
_BETA2 = 0.99  # what DeepSpeed's OneCycle sets beside the momentum that it cycles


@dataclass(frozen=True)
class LRRangeTest:
    """Rise from `lr_range_test_min_lr` without end: by `step_rate` times it in every `step_size` steps."""

    lr_range_test_min_lr: float = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def lr(self, step: int) -> float:
        interval = (step - 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * interval)

    def betas(self, step: int) -> Betas | None:
        return None


@dataclass(frozen=True)
class OneCycle:
    """The rate from minimum to maximum and back, the momentum the other way round; then both decay.

    As in DeepSpeed the momentum of the very first step is the minimum, though the cycle begins at the maximum.
    """

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def lr(self, step: int) -> float:
        if step == 1:
            return self.cycle_min_lr
        decay_steps = self._steps_after_cycle(step)
        if decay_steps is None:
            return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self._height(step - 1)
        if not self.decay_step_size:
            return self.cycle_min_lr
        return self.cycle_min_lr / (1 + self.decay_lr_rate * decay_steps / self.decay_step_size)

    def betas(self, step: int) -> Betas | None:
        """AdamW's betas in this step; None leaves the optimizer's own.

        Raises:
            ConfigError: the decay, which raises the momentum, has brought it to 1.
        """
        if not self.cycle_momentum:
            return None
        if step == 1:
            return self.cycle_min_mom, _BETA2
        decay_steps = self._steps_after_cycle(step)
        if decay_steps is None:
            return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self._height(step - 1), _BETA2
        if not self.decay_step_size:
            return self.cycle_max_mom, _BETA2
        momentum = self.cycle_max_mom * (1 + self.decay_mom_rate * decay_steps / self.decay_step_size)
        if momentum >= 1:
            raise ConfigError(
                f"the momentum's decay has reached 1 in step {step}", where="scheduler.params.decay_mom_rate",
                got=self.decay_mom_rate, wanted="a momentum below 1 to the end", remedy="lower it, or set it to 0",
            )  # fmt: skip
        return momentum, _BETA2

    @property
    def _second_step_size(self) -> int:
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    @property
    def _total(self) -> int:
        return self.cycle_first_step_size + self._second_step_size

    def _steps_after_cycle(self, step: int) -> int | None:
        """Steps of decay, from 1; None within the cycle, whose end is a step longer than its length."""
        iteration = step - 2
        return None if iteration < self._total else iteration - self._total + 1

    def _height(self, position: int) -> float:
        """Part of the way from minimum to maximum at `position` steps from the start, in stairs where there are any."""
        within, first, second = position % self._total, self.cycle_first_step_size, self._second_step_size
        is_rising = within <= first
        rise = within / first if is_rising else (self._total - within) / second
        stairs = self.cycle_first_stair_count
        if not is_rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if not stairs:
            return rise
        numerator, size = (within, first) if is_rising else (self._total - within, second)
        return math.floor(numerator * stairs / size) / stairs
