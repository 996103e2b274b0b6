"""All five of DeepSpeed's schedules against what its own classes gave (`tests/deepspeed/record.py` recorded it)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raydz.config import load_engine
from raydz.errors import ConfigError
from raydz.optim import build_schedule
from tests.deepspeed.record import BASE_LR, SCHEDULES, STEPS

RECORDED = json.loads((Path(__file__).parents[1] / "deepspeed" / "recorded.json").read_text())["schedules"]
ADAMS = (0.9, 0.999)


def build(name: str, params: dict):
    """By way of the configuration, as the engine does."""
    section = load_engine({"train_batch_size": 1, "scheduler": {"type": name, "params": params}}).scheduler
    return build_schedule(section.type, section.params.model_dump(), BASE_LR)


@pytest.mark.parametrize("label", SCHEDULES)
def test_rates_and_betas_are_deepspeeds(label: str) -> None:
    schedule = build(*SCHEDULES[label])
    steps = range(1, STEPS + 1)
    assert [schedule.lr(step) for step in steps] == pytest.approx(RECORDED[label]["rates"], rel=1e-8)
    found = [schedule.betas(step) or ADAMS for step in steps]
    wanted = RECORDED[label]["betas"]
    assert [pair[0] for pair in found] == pytest.approx([pair[0] for pair in wanted], rel=1e-8)
    assert [pair[1] for pair in found] == [pair[1] for pair in wanted]


def test_all_five_are_there() -> None:
    assert len({name for name, _ in SCHEDULES.values()}) == 5


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("lr_range_test_min_lr", 0.02),
        ("lr_range_test_step_size", 5),
        ("lr_range_test_step_rate", 3.0),
        ("lr_range_test_staircase", True),
    ],
)
def test_each_key_of_the_range_test_has_an_effect(key: str, change: object) -> None:
    _assert_changes("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4}, key, change)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("cycle_min_lr", 0.2),
        ("cycle_max_lr", 0.9),
        ("decay_lr_rate", 0.5),
        ("cycle_first_step_size", 5),
        ("cycle_second_step_size", 3),
        ("cycle_first_stair_count", 2),
        ("cycle_second_stair_count", 3),
        ("decay_step_size", 0),
        ("cycle_momentum", False),
        ("cycle_min_mom", 0.7),
        ("cycle_max_mom", 0.95),
        ("decay_mom_rate", 0.004),
    ],
)
def test_each_key_of_the_cycle_has_an_effect(key: str, change: object) -> None:
    base = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.7, "cycle_first_step_size": 4, "decay_step_size": 2}
    _assert_changes("OneCycle", {**base, "decay_lr_rate": 0.3}, key, change)


def _assert_changes(name: str, params: dict, key: str, change: object) -> None:
    before, after = build(name, params), build(name, {**params, key: change})
    steps = range(1, STEPS + 1)
    assert [(before.lr(s), before.betas(s)) for s in steps] != [(after.lr(s), after.betas(s)) for s in steps]


def test_a_momentum_that_decays_to_one_ends_with_its_name() -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.7, "cycle_first_step_size": 2}
    schedule = build("OneCycle", {**params, "decay_step_size": 1, "decay_mom_rate": 0.2})
    with pytest.raises(ConfigError, match="decay_mom_rate"):
        schedule.betas(20)


@pytest.mark.parametrize(
    ("name", "params", "path"),
    [
        ("OneCycle", {"cycle_max_lr": 1.0}, "scheduler.params.cycle_min_lr"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "scheduler.params.lr_range_test_step_size"),
        ("LRRangeTest", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_min_lr"),
    ],
)
def test_what_deepspeed_would_refuse_is_refused_by_name(name: str, params: dict, path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        build(name, params)
