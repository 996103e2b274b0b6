"""The order: one to one, independent of the world, never changed by accident."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydz.data.order import BatchOrder, permute, split
from raydz.errors import ConfigError, DataError


@settings(max_examples=100, deadline=None)
@given(num_rows=st.integers(1, 3000), seed=st.integers(-5, 2**40), epoch=st.integers(0, 9))
def test_permutation_is_one_to_one(num_rows, seed, epoch):
    permuted = permute(np.arange(num_rows), num_rows, seed, epoch)
    assert sorted(permuted.tolist()) == list(range(num_rows))


def test_permutation_stays_in_range_for_huge_data():
    num_rows = 10**12 + 7
    indices = np.arange(num_rows - 10_000, num_rows)
    permuted = permute(indices, num_rows, 3, 0)
    assert permuted.min() >= 0 and permuted.max() < num_rows and len(set(permuted.tolist())) == len(indices)
    assert abs(permuted.mean() / num_rows - 0.5) < 0.02  # 7 standard errors of a uniform mean


def test_neighbours_are_torn_apart_and_epochs_and_seeds_differ():
    n = 10_000
    orders = [permute(np.arange(n), n, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        assert (order == np.arange(n)).sum() < 10
    assert (orders[0] == orders[1]).sum() < 10 and (orders[0] == orders[2]).sum() < 10


def test_order_is_the_one_that_old_checkpoints_were_made_with():
    assert BatchOrder(1000, 6, seed=17).indices(0).tolist() == GOLDEN[0]
    assert BatchOrder(1000, 6, seed=17).indices(166).tolist() == GOLDEN[166]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 60),
    batch_size=st.integers(1, 25),
    micro=st.integers(1, 6),
    world=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_every_row_exactly_once_an_epoch_in_the_same_batches_for_every_world(num_rows, batch_size, micro, world, seed):
    order = BatchOrder(num_rows, batch_size, seed)
    seen = []
    for step in range(-(-3 * num_rows // batch_size)):
        batch = order.indices(step)
        pieces = [split(batch, rank, world, micro) for rank in range(world)]
        assert len({len(piece) for piece in pieces}) == 1
        assert all(len(rows) <= micro for piece in pieces for rows in piece)
        sizes = [sum(map(len, piece)) for piece in pieces]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
        together = np.concatenate([rows for piece in pieces for rows in piece])
        assert together.tolist() == batch.tolist()
        seen += together.tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_a_rank_without_rows_still_takes_part_in_each_micro_batch():
    assert [len(rows) for rows in split(np.arange(5), 2, 3, 1)] == [1, 0]
    assert [len(rows) for rows in split(np.arange(2), 2, 3, 4)] == [0]


def test_resume_goes_on_and_refuses_another_order():
    order = BatchOrder(100, 8, seed=3)
    assert order.check_resume(order.state(next_step=7)) == 7
    for other, name in [
        (BatchOrder(101, 8, 3), "num_rows"),
        (BatchOrder(100, 8, 4), "seed"),
        (BatchOrder(100, 4, 3), "batch_size"),
    ]:
        with pytest.raises(DataError, match=name):
            other.check_resume(order.state(next_step=7))


def test_epoch_counts_what_is_done():
    assert BatchOrder(100, 8).epoch(25) == 2.0


def test_impossible_orders_are_refused():
    with pytest.raises(DataError):
        BatchOrder(0, 1)
    with pytest.raises(ConfigError):
        BatchOrder(1, 0)


GOLDEN = {0: [245, 520, 253, 583, 65, 627], 166: [859, 513, 117, 873, 173, 805]}
