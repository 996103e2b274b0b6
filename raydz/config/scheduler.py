"""`scheduler`: DeepSpeed's learning-rate schedules under DeepSpeed's names.

Layer 1. `engine.EngineSections` has the section; `optim/schedule.py` computes what it says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from raydz.config.section import AboveZero, Count, Fraction, NonNegative, Positive, Section


class WarmupLRParams(Section):
    """From `warmup_min_lr` to `warmup_max_lr` (None: the optimizer's lr), then constant."""

    warmup_min_lr: NonNegative = 0.0
    warmup_max_lr: NonNegative | None = None
    warmup_num_steps: Count = 1000
    warmup_type: Literal["log", "linear"] = "log"


class WarmupDecayLRParams(WarmupLRParams):
    """As WarmupLR, then linear to 0 at `total_num_steps` (None: `train.steps`)."""

    warmup_max_lr: NonNegative | None = 1e-3
    total_num_steps: Positive | None = None


class WarmupCosineLRParams(Section):
    """Ratios of the optimizer's lr: warm-up, then a cosine to `cos_min_ratio` at `total_num_steps`."""

    total_num_steps: Positive | None = None
    """None: `train.steps`."""
    warmup_min_ratio: NonNegative = 0.0
    warmup_num_steps: Count = 1000
    cos_min_ratio: NonNegative = 1e-4
    warmup_type: Literal["log", "linear"] = "log"


class WarmupLR(Section):
    """`scheduler` of type WarmupLR."""

    type: Literal["WarmupLR"]
    params: WarmupLRParams = WarmupLRParams()


class WarmupDecayLR(Section):
    """`scheduler` of type WarmupDecayLR."""

    type: Literal["WarmupDecayLR"]
    params: WarmupDecayLRParams = WarmupDecayLRParams()


class WarmupCosineLR(Section):
    """`scheduler` of type WarmupCosineLR."""

    type: Literal["WarmupCosineLR"]
    params: WarmupCosineLRParams = WarmupCosineLRParams()


class LRRangeTestParams(Section):
    """From `lr_range_test_min_lr` upwards without end, to find the highest rate that trains."""

    lr_range_test_min_lr: AboveZero = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: NonNegative = 1.0
    lr_range_test_staircase: bool = False


class LRRangeTest(Section):
    """`scheduler` of type LRRangeTest."""

    type: Literal["LRRangeTest"]
    params: LRRangeTestParams = LRRangeTestParams()


class OneCycleParams(Section):
    """One rise and fall of lr, momentum the other way round, then decay; None: as in the first half."""

    cycle_min_lr: NonNegative
    cycle_max_lr: NonNegative
    decay_lr_rate: NonNegative = 0.0
    cycle_first_step_size: Positive = 2000
    cycle_second_step_size: Count | None = None
    cycle_first_stair_count: Count = 0
    cycle_second_stair_count: Count | None = None
    decay_step_size: Count = 0
    cycle_momentum: bool = True
    """Cycle AdamW's beta1, with beta2 0.99, as DeepSpeed does."""
    cycle_min_mom: Fraction = 0.8
    cycle_max_mom: Fraction = 0.9
    decay_mom_rate: NonNegative = 0.0


class OneCycle(Section):
    """`scheduler` of type OneCycle."""

    type: Literal["OneCycle"]
    params: OneCycleParams


SchedulerConfig = Annotated[
    WarmupLR | WarmupDecayLR | WarmupCosineLR | LRRangeTest | OneCycle, Field(discriminator="type")
]


def with_total_steps(scheduler: Any, steps: int) -> Any:
    """The same schedule, ending at `steps` where it does not say itself."""
    if not isinstance(scheduler, WarmupDecayLR | WarmupCosineLR) or scheduler.params.total_num_steps is not None:
        return scheduler
    params = scheduler.params.model_copy(update={"total_num_steps": steps})
    return scheduler.model_copy(update={"params": params})
