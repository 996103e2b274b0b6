"""Which ranks a hang is blamed on, without a cluster."""

from __future__ import annotations

import pytest

from raydz.config.cluster import FailureConfig
from raydz.dist.monitor import activity, excused, progressed
from raydz.orchestrate.board import Beat, Standing
from raydz.orchestrate.watchdog import find_stuck, hang_limit_s

CONFIG = FailureConfig(hang_factor=3.0, hang_floor_s=15.0)


def standing(*beats: tuple[Beat, float], moved_at: float = 100.0, step_s: float = 2.0) -> Standing:
    found = Standing(began=0, step=7, moved_at=moved_at, beats={beat.rank: (beat, at) for beat, at in beats})
    found.step_times_s.extend([step_s] * 5)
    return found


def beat(rank: int, *, calls: int = 40, waits_for: str | None = "gather x") -> Beat:
    return Beat(rank, 1000 + rank, "node", 7, calls, waits_for)


def test_the_limit_is_a_multiple_of_the_median_step_and_a_floor() -> None:
    assert hang_limit_s(standing(), CONFIG) == 3 * 2.0 + 15.0


def test_nothing_is_stuck_while_anything_moves_or_before_two_steps() -> None:
    group = standing((beat(0), 120.9), (beat(1, waits_for=None), 120.9))
    assert find_stuck(group, 120.9, CONFIG) == []
    assert find_stuck(group, 121.1, CONFIG) != []
    group.step_times_s.clear()
    assert find_stuck(group, 500.0, CONFIG) == []


def test_a_rank_that_does_not_beat_is_stuck_before_one_that_computes() -> None:
    group = standing((beat(0), 129.5), (beat(1), 108.0), (beat(2, waits_for=None), 129.5))
    assert [found.rank for found in find_stuck(group, 130.0, CONFIG)] == [1]


def test_a_rank_that_computes_while_others_wait_is_stuck() -> None:
    group = standing((beat(0), 129.5), (beat(1, waits_for=None), 129.5), (beat(2), 129.5))
    assert [found.rank for found in find_stuck(group, 130.0, CONFIG)] == [1]


def test_where_all_wait_those_that_launched_least_are_stuck() -> None:
    group = standing((beat(0), 129.5), (beat(1, calls=39), 129.5), (beat(2), 129.5))
    assert [found.rank for found in find_stuck(group, 130.0, CONFIG)] == [1]


@pytest.mark.parametrize("work", ["progressed", "excused"])
def test_work_without_collectives_is_no_hang(work: str) -> None:
    before = activity()[0]
    if work == "progressed":
        progressed()
        assert activity()[0] == before + 1
    else:
        with excused():
            assert [activity()[0] - before for _ in range(3)] == [1, 2, 3]
        assert activity()[0] == before + 3
    assert activity()[0] == activity()[0]
