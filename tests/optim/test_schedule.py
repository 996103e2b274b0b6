"""DeepSpeed's schedules by numbers worked out by hand; step 1 is its iteration -1, step 2 its iteration 0."""

from __future__ import annotations

import math

import pytest

from raydz.errors import ConfigError
from raydz.optim import build_schedule


def rates(name: str | None, params: dict, steps, base_lr: float = 0.5) -> list[float]:
    schedule = build_schedule(name, params, base_lr)
    return [schedule.lr(step) for step in steps]


def test_without_a_schedule_the_rate_is_the_optimizers() -> None:
    assert rates(None, {}, (1, 2, 1000)) == [0.5, 0.5, 0.5]


def test_linear_warmup_stands_at_its_minimum_for_two_steps_and_ends_after_its_number() -> None:
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates("WarmupLR", params, range(1, 9)) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_logarithmic_warmup() -> None:
    params = {"warmup_max_lr": 1.0, "warmup_num_steps": 8}
    # Iterations -1, 0, 1, 3, 7, 8: log2(iteration + 1) / 3.
    assert rates("WarmupLR", params, (1, 2, 3, 5, 9, 10)) == pytest.approx([0, 0, 1 / 3, 2 / 3, 1, 1])


def test_warmup_of_one_step_is_one_of_two() -> None:
    params = {"warmup_max_lr": 1.0, "warmup_num_steps": 1, "warmup_type": "linear"}
    assert rates("WarmupLR", params, (1, 2, 3, 4)) == pytest.approx([0, 0, 0.5, 1])


def test_a_highest_rate_that_is_not_given_is_the_optimizers() -> None:
    assert rates("WarmupLR", {"warmup_max_lr": None}, (5000,)) == [0.5]
    assert rates("WarmupDecayLR", {"total_num_steps": 9000}, (1002,)) == [pytest.approx(1e-3)]


def test_decay_falls_linearly_to_the_minimum_at_the_total() -> None:
    params = {
        "warmup_min_lr": 0.2, "warmup_max_lr": 1.0, "warmup_num_steps": 2, "warmup_type": "linear",
        "total_num_steps": 6,
    }  # fmt: skip
    # Iterations -1 to 7: minimum, 0/2, 1/2, then 4/4, 3/4, 2/4, 1/4, 0/4, 0 of the way from 0.2 to 1.
    wanted = [0.2, 0.2, 0.6, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates("WarmupDecayLR", params, range(1, 10)) == pytest.approx(wanted)


def test_cosine_runs_its_first_step_at_zero_and_ends_at_its_minimum() -> None:
    params = {
        "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1, "warmup_num_steps": 2, "warmup_type": "linear",
        "total_num_steps": 6,
    }  # fmt: skip
    # After warm-up progress is 1/4, 2/4, 3/4, 4/4: cos 45°, 90°, 135°, 180°.
    half = math.sqrt(0.5)
    wanted = [0, 0.2, 0.6, *(0.1 + 0.9 * (1 + c) / 2 for c in (half, 0, -half, -1)), 0.1, 0.1]
    assert rates("WarmupCosineLR", params, range(1, 10), base_lr=1.0) == pytest.approx(wanted)
    assert rates("WarmupCosineLR", params, (3,), base_lr=2.0) == pytest.approx([1.2])


def test_cosine_with_a_logarithmic_warmup() -> None:
    params = {"total_num_steps": 100, "warmup_num_steps": 8}
    assert rates("WarmupCosineLR", params, (3, 5), base_lr=3.0) == pytest.approx([1.0, 2.0])


def test_a_total_within_the_warmup_does_not_divide_by_zero() -> None:
    for name in ("WarmupDecayLR", "WarmupCosineLR"):
        params = {"total_num_steps": 2, "warmup_num_steps": 10}
        assert all(math.isfinite(rate) for rate in rates(name, params, range(1, 30)))


def test_another_schedule_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule("ThreeCycle", {}, 0.1)
    assert "scheduler.type" in str(caught.value) and "ThreeCycle" in str(caught.value)
