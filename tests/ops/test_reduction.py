"""The oracles are Python floats, added one by one in the documented order."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from raydz.errors import LayoutError
from raydz.ops import sum_rows, sum_squares, sum_squares_of_all
from raydz.ops.reduction import sum_rows_reference, sum_squares_reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def ordered_sum_squares(values: list[float]) -> float:
    total = 0.0
    for start in range(0, len(values), 4096):
        lanes = [0.0] * 16
        for i, value in enumerate(values[start : start + 4096]):
            lanes[i % 16] += value * value
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        total += lanes[0]
    return total


def ordered_sum_rows(rows: torch.Tensor, out: torch.Tensor, accumulate: bool) -> torch.Tensor:
    total = rows[0].float().numpy().copy()
    for row in rows[1:]:
        total = numpy.add(total, row.float().numpy(), dtype=numpy.float32)
    return torch.from_numpy(numpy.add(out.numpy(), total) if accumulate else total)


@pytest.mark.native
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_squares_are_added_in_the_documented_order(isa, dtype, offset):
    pool = torch.randn(13_000).to(dtype)
    for numel in [*range(66), 4095, 4096, 4097, 12_345]:
        values = pool[offset : offset + numel]
        assert sum_squares(values) == ordered_sum_squares(values.tolist()), numel


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reference_adds_squares_in_the_documented_order(dtype):
    pool = torch.randn(13_000).to(dtype)
    for numel in (0, 1, 15, 16, 17, 4095, 4096, 4097, 12_345):
        assert sum_squares_reference([pool[1 : 1 + numel]])[0] == ordered_sum_squares(pool[1 : 1 + numel].tolist()), (
            numel
        )


@pytest.mark.native
def test_kernels_equal_the_reference_beyond_one_group_and_with_threads(isa):
    values = torch.randn(1_200_001)
    (expected,) = sum_squares_reference([values])
    assert [sum_squares(values, threads=threads) for threads in (1, 2, 3, 7)] == [expected] * 4


def test_large_finite_gradients_do_not_overflow():
    assert sum_squares(torch.full((8,), 2e19)) == 8 * float(numpy.float32(2e19)) ** 2


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_value_that_is_not_finite_shows(bad, dtype):
    values = torch.zeros(5000, dtype=dtype)
    values[4321] = bad
    assert not math.isfinite(sum_squares(values))


@pytest.mark.native
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_are_added_in_row_order(isa, dtype, accumulate):
    for num_rows in (1, 2, 3, 5):
        rows = (torch.randn(num_rows, 1100) * 10 ** torch.arange(num_rows).view(-1, 1)).to(dtype)
        for numel in [*range(66), 511, 512, 513, 1099]:
            out = torch.randn(numel)
            expected = ordered_sum_rows(rows[:, 1 : 1 + numel], out, accumulate)
            assert torch.equal(sum_rows(rows[:, 1 : 1 + numel], out, accumulate=accumulate), expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_reference_adds_rows_in_row_order(accumulate):
    rows, out = torch.randn(5, 700).half(), torch.randn(700)
    expected = ordered_sum_rows(rows, out, accumulate)
    sum_rows_reference(rows, out, accumulate)
    assert torch.equal(out, expected)


@pytest.mark.native
def test_threads_do_not_change_a_row_sum(isa):
    rows = torch.randn(3, 300_001)
    expected = ordered_sum_rows(rows, torch.empty(0), False)
    for threads in (1, 2, 3, 7):
        assert torch.equal(sum_rows(rows, torch.empty(300_001), threads=threads), expected)


def test_the_reference_stands_in_where_there_are_no_kernels(without_kernels):
    rows = torch.randn(2, 33)
    assert torch.equal(sum_rows(rows, torch.empty(33)), rows[0] + rows[1])
    assert sum_squares(rows[0]) == ordered_sum_squares(rows[0].tolist())


def test_a_wrong_buffer_is_named():
    with pytest.raises(LayoutError, match="where:  values"):
        sum_squares(torch.zeros(4, dtype=torch.int16))
    with pytest.raises(LayoutError, match="where:  rows"):
        sum_rows(torch.zeros(0, 4), torch.zeros(4))
    with pytest.raises(LayoutError, match="where:  rows"):
        sum_rows(torch.zeros(4, 4).t(), torch.zeros(4))
    with pytest.raises(LayoutError, match="where:  out"):
        sum_rows(torch.zeros(2, 4), torch.zeros(5))


def test_several_sums_are_those_of_each_alone():
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)) for numel in (0, 5, 4097, 9000)]
    alone = [ordered_sum_squares(values.tolist()) for values in tensors]
    assert sum_squares_of_all(tensors) == alone == sum_squares_reference(tensors)
