"""The lanes of `sum_squares` for NVIDIA GPUs: one pass, the bits of the torch reference. Layer 2.

Above: `reduction.py`, the only caller, which folds the lanes and adds the blocks. Checked on a GPU by
`tests/cuda/kernels_check.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS_A_PROGRAM = 8


@triton.jit
def _lane_sums(values_ptr, out_ptr, numel, BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    first = rows[:, None] * BLOCK + tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((BLOCKS, LANES), dtype=tl.float64)
    for start in tl.range(0, BLOCK, LANES, loop_unroll_factor=16):  # so many loads under way at a time
        values = tl.load(values_ptr + first + start, first + start < numel, other=0.0).to(tl.float64)
        # A square of fp32 is exact in fp64, so fusing it into the addition changes nothing.
        lanes += values * values
    inside = rows[:, None] * BLOCK < numel
    tl.store(out_ptr + rows[:, None] * LANES + tl.arange(0, LANES)[None, :], lanes, inside)


def lane_sums_cuda(flat: Tensor, block: int, lanes: int) -> Tensor:
    """Lane j of a block adds the squares of its elements j, lanes + j, … in that order.

    Shape: flat (n,) fp32, bf16 or fp16; out (ceil(n / block), lanes) fp64.
    """
    num_blocks = -(-flat.numel() // block)
    out = torch.empty(num_blocks, lanes, dtype=torch.float64, device=flat.device)
    if num_blocks:
        with torch.cuda.device(flat.device):
            _lane_sums[(triton.cdiv(num_blocks, _BLOCKS_A_PROGRAM),)](
                flat, out, flat.numel(), BLOCK=block, LANES=lanes, BLOCKS=_BLOCKS_A_PROGRAM, num_warps=4
            )
    return out
