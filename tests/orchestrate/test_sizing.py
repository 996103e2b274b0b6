"""How many workers, without a cluster: room on nodes of all kinds, what a range allows, when to grow."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydz.config import load
from raydz.errors import ConfigError
from raydz.orchestrate.board import Standing
from raydz.orchestrate.growth import training_of
from raydz.orchestrate.sizing import (
    Growth,
    Training,
    allowed_sizes,
    is_worth_growing,
    largest,
    places,
    steps_up,
)


def a_run(workers: list[int] | int, **sections):
    return load({"scaling": {"num_workers": workers}, "train_batch_size": 12, **sections})


@pytest.mark.parametrize(
    ("nodes", "worker", "room"),
    [
        ([{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 1}, 2),
        ([{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 2}, 0),  # a worker does not spread over nodes
        ([{"CPU": 7.0, "GPU": 1.0}, {"CPU": 64.0}, {"CPU": 3.0, "GPU": 8.0}], {"CPU": 2, "GPU": 1}, 2),
        ([{"CPU": 4.0, "spot": 1.0}, {"CPU": 4.0}], {"CPU": 1, "spot": 0.25}, 4),
        ([{"CPU": 0.3}] * 3, {"CPU": 0.1}, 9),  # 0.3 / 0.1 is 2.9999999999999996
        ([{"CPU": 100.0}], {"CPU": 1}, 10),
        ([], {"CPU": 1}, 0),
        ([{"memory": 1.0}], {"CPU": 0}, 10),  # takes nothing: there is room for any number
    ],
)
def test_room_is_counted_by_node(nodes, worker, room) -> None:
    assert places({str(i): node for i, node in enumerate(nodes)}, worker, most=10) == room


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=3), st.integers(1, 3), st.integers(0, 2))
def test_room_is_what_can_be_put_down_one_by_one(nodes, cpus, gpus) -> None:
    left, placed = [list(node) for node in nodes], 0
    for node in left:
        while node[0] >= cpus and node[1] >= gpus:
            node[0], node[1], placed = node[0] - cpus, node[1] - gpus, placed + 1
    free = {str(i): {"CPU": float(c), "GPU": float(g)} for i, (c, g) in enumerate(nodes)}
    assert places(free, {"CPU": cpus, "GPU": gpus}, most=100) == placed


def test_a_number_is_one_size_and_a_range_all_of_it() -> None:
    assert allowed_sizes(a_run(3)) == (3,)
    assert allowed_sizes(a_run([1, 5])) == (1, 2, 3, 4, 5), "12 rows are cut unevenly on 5"


def test_shard_groups_are_never_cut() -> None:
    assert allowed_sizes(a_run([2, 6], parallel={"shard_size": 2})) == (2, 4, 6)
    for workers in ([1, 4], [2, 5], 3):
        with pytest.raises(ConfigError, match="shard group"):
            allowed_sizes(a_run(workers, parallel={"shard_size": 2}))


def test_a_number_of_workers_wants_a_batch_that_divides() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        allowed_sizes(a_run(5))


def test_the_largest_size_that_there_is_room_for() -> None:
    assert [largest((2, 4, 6), room) for room in range(8)] == [None, None, 2, 2, 4, 4, 6, 6]


def test_steps_to_larger_sizes() -> None:
    assert steps_up((2, 4, 6), 2) == [2, 2] and steps_up((1, 2, 3), 2) == [1] and steps_up((1, 2), 2) == []


def test_growth_waits_until_the_room_stays_the_same() -> None:
    growth = Growth((1, 2, 3, 4), 1)
    assert [growth.look(extra) for extra in (0, 1, 2, 2)] == [None, None, None, 3]


def test_growth_to_the_most_does_not_wait() -> None:
    assert Growth((1, 2, 3, 4), 1).look(3) == 4
    assert Growth((1, 2, 3, 4), 1).look(9) == 4


def test_room_that_completes_no_shard_group_is_no_reason_to_stop() -> None:
    growth = Growth((2, 4), 2)
    assert [growth.look(1) for _ in range(3)] == [None] * 3


def test_a_group_trains_for_a_while_before_and_has_some_to_go() -> None:
    for trained_s, left_s in product((None, 5.0, 60.0, 70.0), (None, 59.0, 60.0)):
        worth = trained_s is not None and trained_s >= 60 and (left_s is None or left_s >= 60)
        assert is_worth_growing(Training(trained_s, left_s), 60.0) is worth


def test_training_is_read_off_the_board() -> None:
    assert training_of(Standing(created_at=0.0), 50.0, steps=100) == Training(None, None)
    first = Standing(created_at=0.0, step=11, step_at=40.0, first_step_at=40.0)
    assert training_of(first, 50.0, steps=100) == Training(10.0, None)
    first.step, first.step_times_s = 20, type(first.step_times_s)([2.0, 2.0, 9.0])
    assert training_of(first, 70.0, steps=100) == Training(30.0, 160.0)
