"""fp16's loss scale: a pure state machine with DeepSpeed's rule, static or dynamic.

Neighbours: `engine.py` multiplies the loss by `scale`, and asks for the next state after each step. Small gradients
underflow in fp16 below 6e-8; the scale lifts them, and falls when the largest overflow.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

_FACTOR = 2.0


@dataclass(frozen=True)
class LossScaleRule:
    """How a dynamic scale moves. Source: DeepSpeed `runtime/fp16/loss_scaler.py`, class DynamicLossScaler.

    Args:
        window: so many steps without an overflow double the scale.
        hysteresis: the overflow with this number since the last refill, and each one after it, halves the scale.
        refills_each_step: a good step refills the hysteresis; otherwise only a doubling does.
        minimum: the scale never falls below.
        is_static: the scale never moves.
    """

    window: int = 1000
    hysteresis: int = 2
    refills_each_step: bool = False
    minimum: float = 1.0
    is_static: bool = False


@dataclass(frozen=True)
class LossScale:
    """The state between two steps.

    Attributes:
        scale: factor of the next loss.
        overflows_left: how many overflows, the halving one included, the hysteresis still has room for.
        good_steps: since the last overflow; the window is counted from it.
        stuck_steps: overflows in a row that the scale could not answer, because it is static or at its minimum.
    """

    rule: LossScaleRule
    scale: float
    overflows_left: int
    good_steps: int = 0
    stuck_steps: int = 0

    @classmethod
    def start(cls, rule: LossScaleRule, scale: float) -> LossScale:
        return cls(rule, scale, rule.hysteresis)

    def after(self, *, overflowed: bool) -> LossScale:
        """The state after a step whose gradients were or were not all finite."""
        if overflowed:
            stuck = self.stuck_steps + 1 if self.rule.is_static or self.scale <= self.rule.minimum else 0
            return replace(self._lower(), good_steps=0, stuck_steps=stuck)
        grown = replace(self, good_steps=self.good_steps + 1, stuck_steps=0)
        if self.rule.is_static:
            return grown
        # As DeepSpeed 0.19 counts: `window` good steps must lie between this one and the last overflow.
        doubles = self.good_steps > 0 and self.good_steps % self.rule.window == 0
        if doubles or self.rule.refills_each_step:
            grown = replace(grown, overflows_left=self.rule.hysteresis)
        return replace(grown, scale=grown.scale * _FACTOR) if doubles else grown

    def _lower(self) -> LossScale:
        if self.rule.is_static:
            return self
        if self.overflows_left > 1:
            return replace(self, overflows_left=self.overflows_left - 1)
        return replace(self, scale=max(self.scale / _FACTOR, self.rule.minimum))

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-serialisable; the rule is the configuration's."""
        return {name: value for name, value in asdict(self).items() if name != "rule"}

    def from_state(self, state: dict[str, Any]) -> LossScale:
        """The stored state under this one's rule; a static scale stays what the configuration says."""
        return self if self.rule.is_static else replace(self, **state)


def build_loss_scale(
    *,
    enabled: bool,
    loss_scale: float,
    initial_scale_power: int,
    loss_scale_window: int,
    hysteresis: int,
    consecutive_hysteresis: bool,
    min_loss_scale: float,
) -> LossScale | None:
    """Of DeepSpeed's section `fp16`; None where it is not enabled."""
    if not enabled:
        return None
    is_static = loss_scale > 0
    rule = LossScaleRule(loss_scale_window, hysteresis, consecutive_hysteresis, min_loss_scale, is_static)
    return LossScale.start(rule, loss_scale if is_static else 2.0**initial_scale_power)
