"""Which checkpoints are kept: worked out by hand, and properties that hold for all runs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydz.checkpoint.retention import Best, Rules, Whole, best_steps, surplus
from raydz.config import load
from raydz.errors import ConfigError

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: 4.0, 60: 5.0}
RUN = [Whole(step, {"eval_loss": loss}) for step, loss in LOSSES.items()]


@pytest.mark.parametrize(
    ("rules", "deleted"),
    [
        (Rules(), []),
        (Rules(last=1), [10, 20, 30, 40, 50]),
        (Rules(last=2), [10, 20, 30, 40]),
        (Rules(last=6), []),
        (Rules(last=100), []),
        (Rules(last=1, every=20), [10, 30, 50]),
        (Rules(last=2, every=30), [10, 20, 40]),
        (Rules(last=1, best=Best("eval_loss")), [10, 30, 40, 50]),  # 20 and 40 are equal: the older one counts
        (Rules(last=1, best=Best("eval_loss", count=3)), [10, 50]),
        (Rules(last=1, best=Best("eval_loss", "max", 2)), [10, 20, 30, 40]),  # 60 and 50
        (Rules(last=1, best=Best("accuracy")), [10, 20, 30, 40, 50]),
        (Rules(last=1, every=30, best=Best("eval_loss")), [10, 40, 50]),
    ],
)
def test_rules_add_up(rules, deleted):
    assert surplus(RUN, rules) == deleted
    assert surplus(RUN[::-1], rules) == deleted


def test_what_is_in_use_stays():
    assert surplus(RUN, Rules(last=1), in_use=[10, 40]) == [20, 30, 50]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_metric_that_is_no_number_is_never_the_best(mode):
    found = [Whole(1, {"m": math.nan}), Whole(2, {}), Whole(3, {"m": 7.0}), Whole(4, {"m": math.nan})]
    assert best_steps(found, Best("m", mode, 2)) == [3]


def test_infinities_are_ordered():
    found = [Whole(1, {"m": math.inf}), Whole(2, {"m": 0.0}), Whole(3, {"m": -math.inf})]
    assert best_steps(found, Best("m", count=2)) == [3, 2]
    assert best_steps(found, Best("m", "max", count=2)) == [1, 2]


steps = st.lists(st.integers(0, 200), unique=True, max_size=30)
metrics = st.floats(allow_nan=True, allow_infinity=True)
best = st.none() | st.builds(Best, st.just("m"), st.sampled_from(["min", "max"]), st.integers(1, 4))
rules = st.builds(Rules, st.integers(1, 8), st.integers(0, 50), best)


@given(st.data(), steps, rules, st.sets(st.integers(0, 200), max_size=4))
def test_nothing_that_counts_is_deleted(data, steps, rules, in_use):
    found = [Whole(step, {"m": data.draw(metrics)}) for step in steps]
    gone = surplus(found, rules, in_use)
    left = sorted(set(steps) - set(gone))
    assert gone == sorted(gone) and set(gone) <= set(steps)
    assert sorted(steps)[-rules.last :] == left[-min(rules.last, len(steps)) :], "the newest stay"
    assert not in_use & set(gone)
    assert not [step for step in gone if rules.every and step % rules.every == 0]
    if rules.best and any(not math.isnan(whole.metrics["m"]) for whole in found):
        values = {whole.step: whole.metrics["m"] for whole in found if not math.isnan(whole.metrics["m"])}
        extreme = min(values.values()) if rules.best.mode == "min" else max(values.values())
        assert extreme in [values[step] for step in left if step in values]
    assert surplus([whole for whole in found if whole.step in left], rules, in_use) == [], "once is enough"


@given(steps, rules)
def test_the_newest_is_always_left(steps, rules):
    found = [Whole(step) for step in steps]
    assert not steps or max(steps) not in surplus(found, rules)


@pytest.mark.parametrize(
    "rules",
    [
        {"last": 0},
        {"every": -1},
        {"best": Best("m", count=0)},
        {"best": Best("m", mode="least")},
    ],
)
def test_rules_that_make_no_sense_are_refused(rules):
    with pytest.raises(ConfigError):
        Rules(**rules)


def test_rules_come_from_the_configuration():
    section = {"keep_last": 3, "keep_every": 100, "keep_best": {"metric": "eval_loss", "mode": "max", "count": 2}}
    assert Rules.of(load({"checkpoint": section}).checkpoint) == Rules(3, 100, Best("eval_loss", "max", 2))
    assert Rules.of(load({}).checkpoint) == Rules()


@pytest.mark.parametrize("rest", [{"keep_every": 10}, {"keep_best": {"metric": "eval_loss"}}])
def test_keeping_more_than_all_is_refused(rest):
    with pytest.raises(ConfigError, match="no effect while all checkpoints are kept") as caught:
        load({"checkpoint": rest})
    assert f"checkpoint.{next(iter(rest))}" in caught.value.where
    load({"checkpoint": {"keep_last": 1, **rest}})


def test_a_sweep_that_could_meet_a_living_save_is_refused():
    with pytest.raises(ConfigError, match="under way"):
        load({"checkpoint": {"timeout_s": 600, "sweep_after_s": 600}})
    load({"checkpoint": {"timeout_s": 600, "sweep_after_s": 601}})
    load({"checkpoint": {"sweep_after_s": None}})
