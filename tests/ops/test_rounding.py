"""The oracle is the rule itself in Python integers, element by element."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydz.errors import LayoutError
from raydz.ops import merge_master, round_bf16, split_master
from raydz.ops.rounding import merge_reference, split_reference

EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF, 0x00800000,
    0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
    0xFF800000, 0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 0xFFFFFFFF,
]  # fmt: skip
PATTERNS = st.lists(st.sampled_from(EDGES) | st.integers(0, 2**32 - 1), min_size=1, max_size=200)


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(numpy.array(bits, dtype=numpy.uint32).view(numpy.float32).copy())


def bits_of(tensor: torch.Tensor) -> list[int]:
    signed, mask = {4: (torch.int32, 0xFFFFFFFF), 2: (torch.int16, 0xFFFF)}[tensor.element_size()]
    return [value & mask for value in tensor.view(signed).tolist()]


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > 0x7F800000


def rounded(bits: int) -> int:
    return bits >> 16 | 0x40 if is_nan(bits) else (bits + 0x8000) >> 16


@given(bits=PATTERNS)
@settings(max_examples=200, deadline=None)
def test_weights_round_half_up_and_every_number_comes_back(bits):
    master = from_bits(bits)
    hi, low = split_master(master)
    assert bits_of(hi) == [rounded(b) for b in bits]
    back = bits_of(merge_master(hi, low))
    assert [b for b, was in zip(back, bits, strict=True) if not is_nan(was)] == [b for b in bits if not is_nan(b)]
    assert torch.equal(hi.isnan(), master.isnan())
    assert torch.equal(merge_master(hi, low).isnan(), master.isnan())


@given(bits=PATTERNS)
@settings(max_examples=100, deadline=None)
def test_rounding_without_the_remainder_gives_the_same_weight(bits):
    assert bits_of(round_bf16(from_bits(bits))) == [rounded(b) for b in bits]


def test_a_tie_goes_up_where_torch_goes_to_even():
    tie = from_bits([0x3F808000])
    assert bits_of(round_bf16(tie)) == [0x3F81]
    assert bits_of(tie.bfloat16()) == [0x3F80]


def test_remainder_of_a_nan_is_zero():
    _, low = split_master(from_bits([0x7F800001, 0xFFFFFFFF, 0x7FFF8000]))
    assert low.tolist() == [0, 0, 0]


@pytest.mark.native
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_kernels_equal_the_reference_at_every_length(isa, offset):
    pool = torch.randint(-(2**31), 2**31, (80,), dtype=torch.int32).view(torch.float32)
    for numel in range(66):
        master = pool[offset : offset + numel]
        hi, low = split_master(master)
        hi_ref, low_ref = torch.empty_like(hi), torch.empty_like(low)
        split_reference(master, hi_ref, low_ref)
        assert bits_of(hi) == bits_of(hi_ref)
        assert torch.equal(low, low_ref)
        merged_ref = torch.empty(numel)
        merge_reference(hi, low, merged_ref)
        assert bits_of(merge_master(hi, low)) == bits_of(merged_ref)


@pytest.mark.native
def test_threads_do_not_change_the_result(isa):
    master = torch.randn(300_001)
    hi, low = split_master(master)
    for threads in (2, 3, 7):
        hi_t, low_t = split_master(master, threads=threads)
        assert torch.equal(hi, hi_t)
        assert torch.equal(low, low_t)
        assert torch.equal(merge_master(hi, low, threads=threads), master)
        assert torch.equal(round_bf16(master, threads=threads), hi)


def test_the_reference_stands_in_where_there_are_no_kernels(without_kernels):
    master = from_bits(EDGES)
    hi, low = split_master(master)
    assert bits_of(hi) == [rounded(b) for b in EDGES]
    assert bits_of(round_bf16(master)) == bits_of(hi)
    assert [b for b in bits_of(merge_master(hi, low)) if not is_nan(b)] == [b for b in EDGES if not is_nan(b)]


def test_a_given_buffer_is_filled_and_returned():
    hi, low, out = torch.empty(4, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int16), torch.empty(4)
    master = torch.randn(4)
    assert split_master(master, hi, low)[0] is hi
    assert merge_master(hi, low, out) is out
    assert torch.equal(out, master)


def test_a_wrong_buffer_is_named():
    with pytest.raises(LayoutError, match="where:  master"):
        split_master(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(LayoutError, match="where:  low"):
        merge_master(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int16))
    with pytest.raises(LayoutError, match="where:  source"):
        round_bf16(torch.zeros(4, 4).t())
