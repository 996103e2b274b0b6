"""The loss scale against DeepSpeed's rule, written down from its loop with an iteration counter."""

from __future__ import annotations

import json
import random

import pytest

from raydz.optim import LossScale, LossScaleRule


def deepspeed_scales(overflows: list[bool], rule: LossScaleRule, scale: float) -> list[float]:
    """DynamicLossScaler.update_scale of DeepSpeed 0.19.8, which counts iterations instead of good steps."""
    last_overflow, hysteresis, scales = -1, rule.hysteresis, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if rule.hysteresis == 1 or hysteresis == 1:
                scale = max(scale / 2, rule.minimum)
            else:
                hysteresis -= 1
            last_overflow = iteration
        else:
            if rule.refills_each_step:
                hysteresis = rule.hysteresis
            stable = iteration - last_overflow - 1
            if stable > 0 and stable % rule.window == 0:
                hysteresis = rule.hysteresis
                scale *= 2
        scales.append(scale)
    return scales


@pytest.mark.parametrize("refills", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_scale_moves_as_deepspeed_moves_it(window: int, hysteresis: int, refills: bool) -> None:
    rule = LossScaleRule(window, hysteresis, refills, minimum=0.5)
    generator = random.Random(window * 100 + hysteresis * 10 + refills)
    overflows = [generator.random() < 0.35 for _ in range(400)]
    state, found = LossScale.start(rule, 16.0), []
    for overflow in overflows:
        state = state.after(overflowed=overflow)
        found.append(state.scale)
    assert found == deepspeed_scales(overflows, rule, 16.0)
    assert len(set(found)) > 3


def test_only_overflows_that_the_scale_cannot_answer_are_stuck() -> None:
    state, counts = LossScale.start(LossScaleRule(hysteresis=1), 4.0), []
    for overflow in (True, True, True, True, False, True):
        state = state.after(overflowed=overflow)
        counts.append((state.scale, state.stuck_steps))
    assert counts == [(2, 0), (1, 0), (1, 1), (1, 2), (1, 0), (1, 1)]


def test_a_static_scale_never_moves_and_each_overflow_is_stuck() -> None:
    state = LossScale.start(LossScaleRule(window=1, hysteresis=1, is_static=True), 128.0)
    for _ in range(3):
        state = state.after(overflowed=True)
    assert (state.scale, state.stuck_steps) == (128, 3)
    assert state.after(overflowed=False).scale == 128


def test_a_state_survives_json_and_goes_on_where_it_was() -> None:
    rule = LossScaleRule(window=3, hysteresis=2)
    state = LossScale.start(rule, 64.0)
    for overflow in (True, False, False, False):
        state = state.after(overflowed=overflow)
    loaded = LossScale.start(rule, 2.0**16).from_state(json.loads(json.dumps(state.to_state())))
    assert loaded == state
    assert loaded.after(overflowed=False).scale == 128
