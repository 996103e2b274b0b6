"""Loss spikes: the rule by hand, and what each action leaves, against runs whose bad steps are skipped for NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from raydz.config import LossSpikeConfig, load
from raydz.errors import ConfigError, TrainingError
from raydz.train.spikes import SpikeWatch
from tests.train.runs import Interrupted, column, manifests, run, run_config, run_on_rank

NAN = math.nan


class BadSteps:
    """The usual loss times a factor in some forward passes of this process (counted from 1), on some ranks."""

    def __init__(self, factors: dict[int, float], ranks: tuple[int, ...] = (0, 1), stop_after: int = 99) -> None:
        self.factors, self.ranks, self.stop_after, self.calls = factors, ranks, stop_after, 0

    def __call__(self, model, batch):
        from raydz.models import causal_lm_loss

        self.calls += 1
        if self.calls > self.stop_after:
            raise Interrupted
        loss = causal_lm_loss(model, batch)
        return loss * self.factors.get(self.calls, 1.0) if model.world.rank in self.ranks else loss


def spiky(folder: Path, action: str, every: int = 2, **rule) -> dict:
    """A run of 9 steps that compares with the 3 steps before."""
    watched = {"action": action, "window": 3, "threshold": 1.5, **rule}
    return run_config(folder, train={"steps": 9, "loss_spike": watched}, checkpoint={"every": every})


def plain(folder: Path, every: int = 2) -> dict:
    return run_config(folder, train={"steps": 9}, checkpoint={"every": every}, run={"name": "b"})


def events(folder: Path) -> list[dict]:
    lines = (folder / "runs" / "a" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "loss_spike"]


# -- the rule ----------------------------------------------------------------------------------------------------------


def judged(losses: list[float], **rule) -> list[bool]:
    watch = SpikeWatch(LossSpikeConfig(**{"window": 4, "threshold": 2.0, "action": "skip", **rule}))
    return [watch.judge(step, loss) is not None for step, loss in enumerate(losses, 1)]


def test_median_times_the_threshold_once_the_window_is_full() -> None:
    assert judged([1, 9, 1, 1, 2.1, 1.9]) == [False] * 4 + [True, False]  # medians 1 and 1: 9 counts as one of four
    assert judged([1, 1, 1, 9]) == [False] * 4


def test_standard_deviations_above_the_mean() -> None:
    # Of 1, 2, 3, 4 the mean is 2.5 and the deviation sqrt(1.25) = 1.118: two of them end at 4.736.
    assert judged([1, 2, 3, 4, 4.74], rule="zscore")[-1]
    assert not judged([1, 2, 3, 4, 4.73], rule="zscore")[-1]
    assert not judged([1, 1, 1, 1, 5], rule="zscore")[-1]  # no deviation, no score


def test_a_spike_that_is_acted_on_does_not_enter_the_window_and_a_warned_one_does() -> None:
    assert judged([1, 1, 1, 1, 5, 5, 5, 5]) == [False] * 4 + [True] * 4
    # The window goes 1115, 1155 (median 3), 1555: two warnings, then 5 is usual.
    assert judged([1, 1, 1, 1, 5, 5, 5, 5], action="warn") == [False] * 4 + [True, True, False, False]


def test_what_is_not_finite_is_no_spike_and_not_kept() -> None:
    assert judged([1, 1, NAN, math.inf, 1, 1, 3]) == [False] * 6 + [True]


def test_so_many_in_a_row_end_the_training_and_an_ordinary_step_starts_anew() -> None:
    judged([1, 1, 1, 1, 5, 5, 1, 5, 5], max_in_row=3)
    with pytest.raises(TrainingError, match="3 loss spikes in a row"):
        judged([1, 1, 1, 1, 5, 5, 5], max_in_row=3)
    judged([1, 1, 1, 1, 5, 6, 9], max_in_row=3, action="warn")


def test_state_goes_on_where_it_was() -> None:
    config = LossSpikeConfig(window=3, action="skip")
    first, second = SpikeWatch(config), SpikeWatch(config)
    for step, loss in enumerate([1, 1.5, 2, 9], 1):
        first.judge(step, loss)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.state() == first.state() == {"losses": [1, 1.5, 2], "count": 1, "in_row": 1}
    assert second.judge(5, 3.1) == first.judge(5, 3.1) is not None


# -- what a run does ---------------------------------------------------------------------------------------------------


def test_warning_changes_nothing_but_what_is_told(tmp_path: Path) -> None:
    run(spiky(tmp_path, "warn"), loss=BadSteps({6: 5.0}))
    run(plain(tmp_path), loss=BadSteps({6: 5.0}))
    assert column(tmp_path, "loss") == column(tmp_path, "loss", "b")
    assert column(tmp_path, "loss_spikes") == [0] * 5 + [1] * 4
    (event,) = events(tmp_path)
    assert (event["step"], event["action"], event["done"]) == (6, "warn", "trained on")
    assert event["loss"] == column(tmp_path, "loss")[5] and event["score"] > 1.5


def test_skipping_leaves_what_a_step_without_gradients_leaves(tmp_path: Path) -> None:
    run(spiky(tmp_path, "skip"), loss=BadSteps({6: 5.0}))
    run(plain(tmp_path), loss=BadSteps({6: NAN}))
    found, wanted = column(tmp_path, "loss"), column(tmp_path, "loss", "b")
    assert found[:5] == wanted[:5] and found[6:] == wanted[6:]
    assert column(tmp_path, "lr") == column(tmp_path, "lr", "b")
    assert column(tmp_path, "skipped_steps") == [0] * 5 + [1] * 4
    assert [event["done"] for event in events(tmp_path)] == ["skipped"]


def test_rewinding_goes_back_to_the_checkpoint_and_on_with_the_next_rows(tmp_path: Path) -> None:
    run(spiky(tmp_path, "rewind", every=4), loss=BadSteps({6: 5.0}))
    # Of the state after step 4 and the rows of step 7 on: as if steps 5 and 6 had had no gradients.
    run(plain(tmp_path, every=4), loss=BadSteps({5: NAN, 6: NAN}))
    found, wanted = column(tmp_path, "loss"), column(tmp_path, "loss", "b")
    assert found[:4] == wanted[:4] and found[6:] == wanted[6:]
    assert column(tmp_path, "lr")[6:] == column(tmp_path, "lr", "b")[6:]
    assert [event["done"] for event in events(tmp_path)] == ["rewound to step-0000000004"]
    assert manifests(tmp_path) == ["step-0000000004", "step-0000000008", "step-0000000009"]


def test_rewinding_before_the_first_checkpoint_skips_and_says_so(tmp_path: Path) -> None:
    run(spiky(tmp_path, "rewind", every=0), loss=BadSteps({6: 5.0}))
    run(plain(tmp_path, every=0), loss=BadSteps({6: NAN}))
    assert column(tmp_path, "loss")[6:] == column(tmp_path, "loss", "b")[6:]
    assert "no checkpoint" in events(tmp_path)[0]["done"]


def test_a_run_that_is_killed_after_rewinding_rewinds_again(tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    straight.mkdir()
    run(spiky(straight, "rewind", every=4), loss=BadSteps({6: 5.0}))
    with pytest.raises(Interrupted):
        run(spiky(tmp_path, "rewind", every=4), loss=BadSteps({6: 5.0}, stop_after=7))
    run(spiky(tmp_path, "rewind", every=4), loss=BadSteps({2: 5.0}))  # begins with step 5
    assert column(tmp_path, "loss") == column(straight, "loss")
    assert column(tmp_path, "loss_spikes") == column(straight, "loss_spikes")


def test_a_spike_on_one_rank_is_every_ranks(ranks, tmp_path: Path) -> None:
    config = spiky(tmp_path, "skip") | {"zero_optimization": {"stage": 3}}
    hooks = {"loss": BadSteps({6: 9.0}, ranks=(1,))}
    results = ranks(2).run(run_on_rank, config, hooks)
    assert [result.status for result in results] == ["finished"] * 2
    assert results[0].metrics["loss"] == results[1].metrics["loss"]
    assert [result.metrics["skipped_steps"] for result in results] == [1, 1]


# -- averaged weights in a run -----------------------------------------------------------------------------------------


def evaluated(folder: Path, name: str, **train) -> list:
    run(run_config(folder, train={"steps": 4, "eval_every": 4, **train}, run={"name": name}))
    return column(folder, "eval_loss", name)


def test_evaluation_may_use_the_average(tmp_path: Path) -> None:
    weights = evaluated(tmp_path, "a")
    assert evaluated(tmp_path, "b", ema_decay=0.9) == weights
    assert evaluated(tmp_path, "c", ema_decay=0.0, evaluate_ema=True) == weights  # it is the weights then
    average = evaluated(tmp_path, "d", ema_decay=0.9, evaluate_ema=True)
    assert average[-1] > weights[-1]  # it lags behind weights that learn
    assert column(tmp_path, "loss", "d") == column(tmp_path, "loss", "a")
    folder = tmp_path / "runs" / "d" / "checkpoints" / "step-0000000004"
    assert '"ema"' in (folder / "manifest.json").read_text()


def test_evaluating_an_average_that_is_not_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.evaluate_ema"):
        load({"train": {"evaluate_ema": True}})


def test_the_names_of_runs_that_use_none_of_this_stay() -> None:
    assert load({"train": {"loss_spike": None, "ema_decay": None}}).run.name == load({}).run.name
    assert load({"train": {"ema_decay": 0.9}}).run.name != load({}).run.name
    both = {"ema_decay": 0.9, "evaluate_ema": True}
    assert load({"train": both}).run.name == load({"train": {"ema_decay": 0.9}}).run.name
