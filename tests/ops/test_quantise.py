"""Int8 blocks: the error against its bound, by numpy in fp64; what is not finite; lengths that divide by nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raydz.errors import LayoutError
from raydz.ops.quantise import BLOCK, pack_int8, packed_bytes, sum_packed, unpack_int8

# The scale, the quotient and the product are each rounded to fp32: 3 times 2**-24 of at most the block's largest.
ROUNDING = 3 * 2.0**-24
LENGTHS = (0, 1, 3, 16, 255, 256, 257, 1000, 1 << 17, (1 << 17) + 777)


def block_maxima(values: np.ndarray) -> np.ndarray:
    """Largest magnitude of each element's block, for every element."""
    largest = np.empty_like(values)
    for start in range(0, values.shape[-1], BLOCK):
        part = values[..., start : start + BLOCK]
        largest[..., start : start + BLOCK] = np.abs(part).max(-1, keepdims=True)
    return largest


def packed_of(rows: Tensor) -> Tensor:
    return pack_int8(rows, torch.full((rows.shape[0], packed_bytes(rows.shape[1])), 255, dtype=torch.uint8))


def there_and_back(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return unpack_int8(packed_of(rows), torch.full(rows.shape, torch.nan, dtype=dtype))


def random_rows(num_rows: int, numel: int, seed: int = 0) -> Tensor:
    """Blocks of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(8 * torch.randn(num_rows, -(-numel // 64), generator=generator)).repeat_interleave(64, 1)
    return torch.randn(num_rows, numel, generator=generator) * magnitudes[:, :numel]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", LENGTHS)
def test_an_element_is_off_by_at_most_a_254th_of_its_blocks_largest(numel: int, dtype: torch.dtype) -> None:
    rows = random_rows(2, numel).clamp(-6e4, 6e4).to(dtype)
    found = there_and_back(rows).double().numpy()
    exact = rows.double().numpy()
    assert (np.abs(found - exact) <= block_maxima(exact) * (1 / 254 + ROUNDING)).all()


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=BLOCK))
def test_the_bound_holds_for_any_block_and_what_is_finite_stays_finite(values: list[float]) -> None:
    found = there_and_back(torch.tensor([values])).double().numpy()[0]
    largest = max(abs(value) for value in values)
    # below fp32's normal numbers a scale has fewer bits: half of the smallest number, times the largest code
    assert np.isfinite(found).all()
    assert (np.abs(found - values) <= largest * (1 / 254 + 4 * ROUNDING) + 127 * 2.0**-150).all()


def test_the_bound_is_reached_and_the_largest_element_is_exact() -> None:
    rows = torch.zeros(1, BLOCK)
    rows[0, :3] = torch.tensor([127.0, 0.5, 41.5])  # halves go to even codes: 0 and 42
    assert there_and_back(rows)[0, :4].tolist() == [127.0, 0.0, 42.0, 0.0]


def test_zeros_stay_zeros() -> None:
    assert there_and_back(torch.zeros(3, 300)).count_nonzero() == 0


def test_what_was_rounded_once_is_rounded_to_itself() -> None:
    once = there_and_back(random_rows(2, 1000))
    torch.testing.assert_close(there_and_back(once), once, rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_comes_back_so_and_does_not_disturb_its_block(bad: float, dtype: torch.dtype) -> None:
    rows = random_rows(2, 600).clamp(-6e4, 6e4).to(dtype)
    expected = rows.clone()
    expected[1, 300] = expected[0, 599] = 0
    rows[1, 300] = rows[0, 599] = bad
    found, wanted = there_and_back(rows), there_and_back(expected)
    assert not found[1, 300].isfinite() and not found[0, 599].isfinite()
    found[1, 300] = found[0, 599] = 0
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [1, 257, 70_000])
def test_a_sum_has_the_bits_of_adding_rows_in_order(numel: int, num_rows: int, accumulate: bool) -> None:
    rows = random_rows(num_rows, numel)
    start = torch.randn(numel)
    values = there_and_back(rows).numpy()
    wanted = values[0].copy()
    for row in values[1:]:
        wanted = wanted + row
    wanted = start.numpy() + wanted if accumulate else wanted
    found = sum_packed(packed_of(rows), start.clone(), accumulate=accumulate)
    assert found.numpy().tobytes() == wanted.tobytes()


def test_a_row_takes_a_byte_an_element_and_four_a_block() -> None:
    assert packed_bytes(0) == 0
    for numel in (4096, 1 << 20):
        assert packed_bytes(numel) == numel + 4 * numel // 256
    for numel in range(1, 600):
        assert packed_bytes(numel) % 16 == 0
        assert 0 <= packed_bytes(numel) - numel - 4 * -(-numel // 256) < 31


def test_16_bit_results_are_rounded_once_more() -> None:
    rows = random_rows(1, 512)
    assert torch.equal(there_and_back(rows, torch.bfloat16), there_and_back(rows).to(torch.bfloat16))


def test_buffers_that_do_not_fit_are_refused() -> None:
    rows = torch.zeros(2, 100)
    for packed in (
        torch.zeros(2, packed_bytes(100) + 16, dtype=torch.uint8),
        torch.zeros(3, packed_bytes(100), dtype=torch.uint8),
        torch.zeros(2, packed_bytes(100), dtype=torch.int8),
    ):
        with pytest.raises(LayoutError, match="packed"):
            pack_int8(rows, packed)
    with pytest.raises(LayoutError, match="values"):
        pack_int8(torch.zeros(2, 100, dtype=torch.int32), torch.zeros(2, packed_bytes(100), dtype=torch.uint8))
    with pytest.raises(LayoutError, match="packed"):
        sum_packed(torch.zeros(2, packed_bytes(100), dtype=torch.uint8), torch.zeros(101 + 255))
