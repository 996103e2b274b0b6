"""A shard's master weights come back bit for bit, whole or split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from raydz.optim import WeightShard

FLOATS = arrays(np.float32, st.integers(0, 65), elements=st.floats(width=32, allow_nan=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(values=FLOATS)
def test_stored_values_come_back_bit_for_bit(dtype: torch.dtype, values: np.ndarray) -> None:
    shard = WeightShard.around(torch.empty(values.size, dtype=dtype))
    shard.store(torch.from_numpy(values))
    assert shard.master().numpy().tobytes() == values.tobytes()


@given(values=FLOATS)
def test_split_weights_are_what_the_forward_reads_to_half_a_unit_of_bf16(values: np.ndarray) -> None:
    shard = WeightShard.around(torch.empty(values.size, dtype=torch.bfloat16))
    shard.store(torch.from_numpy(values))
    bits = values.view(np.uint32).astype(np.uint64)
    wanted = ((bits + 0x8000) >> 16).astype(np.uint16)  # half up in magnitude
    assert np.array_equal(shard.compute.view(torch.int16).numpy().view(np.uint16), wanted)


def test_a_slice_is_the_same_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        shard = WeightShard.around(torch.zeros(5, dtype=dtype))
        shard.slice(1, 3).store(torch.tensor([1.00001, -2.5]))
        assert shard.master().tolist() == [0, torch.tensor(1.00001).item(), -2.5, 0, 0]


def test_fp32_weights_are_their_own_master_and_bf16_ones_hold_a_low_half() -> None:
    whole, split = (WeightShard.around(torch.zeros(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert whole.low is None and whole.master() is whole.compute
    assert split.low.dtype == torch.int16 and split.low.tolist() == [0, 0, 0]


def test_bf16_weights_without_a_low_half_round_as_split_ones_do() -> None:
    halves = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32).view(torch.float32)
    split, plain = (
        WeightShard.around(torch.zeros(3, dtype=torch.bfloat16)),
        WeightShard(torch.zeros(3, dtype=torch.bfloat16)),
    )
    split.store(halves)
    plain.store(halves)
    assert plain.compute.tolist() == split.compute.tolist() == [1.0078125, 1.015625, -1.0078125]
