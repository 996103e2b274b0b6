from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import raydz.tracking.metrics as metrics_module
from raydz.errors import ConfigError
from raydz.tracking.metrics import METRICS, find, reduce_over_ranks


def on_all_ranks(locals_by_rank: list[dict[str, float]]) -> list[dict[str, float]]:
    """What each rank gets, with an all-gather that first collects every rank's vector."""
    vectors: list[list[float]] = []
    for local in locals_by_rank:
        reduce_over_ranks(local, lambda vector: [vectors.append(vector) or vector])
    assert len({len(vector) for vector in vectors}) == 1, "ranks would hang in a real collective"
    return [reduce_over_ranks(local, lambda _: vectors) for local in locals_by_rank]


def test_memory_is_the_largest_and_time_both_mean_and_largest():
    a = {"step_time_s": 1.0, "memory_peak_bytes": 5e9, "tokens_per_s": 100.0, "comm_share": 0.1}
    b = {"step_time_s": 3.0, "memory_peak_bytes": 7e9, "tokens_per_s": 300.0, "comm_share": 0.3}
    c = {"step_time_s": 2.0, "memory_peak_bytes": 6e9, "tokens_per_s": 200.0, "comm_share": 0.2}
    for reduced in on_all_ranks([a, b, c]):
        assert reduced["step_time_s"] == 2.0
        assert reduced["step_time_max_s"] == 3.0
        assert reduced["memory_peak_bytes"] == 7e9
        assert reduced["tokens_per_s"] == 600.0
        assert reduced["comm_share"] == pytest.approx(0.2)


def test_a_metric_that_one_rank_lacks_is_reduced_over_the_others():
    with_it, without = {"loss": 2.0, "checkpoint_blocking_s": 4.0}, {"loss": 4.0}
    for reduced in on_all_ranks([without, with_it]):
        assert reduced == {"loss": 3.0, "checkpoint_blocking_s": 4.0}


def test_metrics_of_rank_0_are_not_sent():
    sent: list[list[float]] = []
    reduced = reduce_over_ranks({"lr": 0.125, "eval_loss/wiki": 3.5}, lambda v: [sent.append(v) or v])
    assert reduced == {"lr": 0.125, "eval_loss/wiki": 3.5}
    assert 0.125 not in sent[0] and 3.5 not in sent[0]


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
@pytest.mark.parametrize("name", ["loss", "memory_peak_bytes", "tokens_per_s"])
def test_nan_of_any_rank_survives(name, order):
    reduced = on_all_ranks([{name: value} for value in order])
    assert all(math.isnan(each[name]) for each in reduced)


@pytest.mark.parametrize("name", ["Loss", "eval_loss/", "loss/wiki", "los", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(ConfigError):
        find(name)


def test_the_closest_name_is_proposed():
    with pytest.raises(ConfigError, match=re.escape("memory_peak_bytes?")):
        find("memory_peak_byte")


def test_the_readme_lists_every_metric_with_its_reduction():
    readme = (Path(metrics_module.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (\w+) \|", readme, flags=re.M)
    assert rows == [(m.name, m.unit, m.reduce) for m in METRICS.values()]
