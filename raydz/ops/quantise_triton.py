"""Int8 blocks on NVIDIA GPUs: one pass each way, the bits of the torch reference. Layer 2.

Above: `quantise.py`, the only caller. Every operation rounds once: fused multiply-add is switched off at the launch,
division is the correctly rounded one. Checked on a GPU by `tests/cuda/zeropp_check.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS_A_PROGRAM = 8


@triton.jit
def _pack(
    rows_ptr, codes_ptr, scales_ptr, numel, row_bytes, first_scale, limit, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(rows_ptr + row * numel + at, at < numel, other=0.0).to(tl.float32)
    is_finite = tl.abs(x) < float("inf")
    x = tl.where(is_finite, x, 0.0)
    largest = tl.minimum(tl.max(tl.abs(x), 1), limit)
    scales = tl.div_rn(largest, tl.full((BLOCKS,), 127.0, tl.float32))
    divisors = tl.where(scales == 0, 1.0, scales)[:, None] + tl.zeros_like(x)
    codes = tl.minimum(tl.maximum(tl.div_rn(x, divisors), -127.0), 127.0)
    codes = (codes + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds to a whole number, half to even
    codes = tl.where(is_finite, codes, -128.0)
    tl.store(codes_ptr + row * row_bytes + at, codes.to(tl.int8), at < numel)
    tl.store(scales_ptr + row * (row_bytes // 4) + first_scale + blocks, scales, blocks * BLOCK < numel)


@triton.jit
def _values(codes_ptr, scales_ptr, row, blocks, at, numel, row_bytes, first_scale, BLOCK: tl.constexpr):
    codes = tl.load(codes_ptr + row * row_bytes + at, at < numel, other=0)
    scales = tl.load(scales_ptr + row * (row_bytes // 4) + first_scale + blocks, blocks * BLOCK < numel, other=0.0)
    return tl.where(codes == -128, float("nan"), codes.to(tl.float32) * scales[:, None])


@triton.jit
def _unpack(
    codes_ptr, scales_ptr, rows_ptr, numel, row_bytes, first_scale, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = _values(codes_ptr, scales_ptr, row, blocks, at, numel, row_bytes, first_scale, BLOCK)
    tl.store(rows_ptr + row * numel + at, values.to(rows_ptr.dtype.element_ty), at < numel)


@triton.jit
def _sum(
    codes_ptr, scales_ptr, out_ptr, num_rows, numel, row_bytes, first_scale,
    ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = tl.zeros((), tl.int64)
    total = _values(codes_ptr, scales_ptr, first, blocks, at, numel, row_bytes, first_scale, BLOCK)
    for row in range(1, num_rows):
        total += _values(codes_ptr, scales_ptr, first + row, blocks, at, numel, row_bytes, first_scale, BLOCK)
    if ACCUMULATE:
        total = tl.load(out_ptr + at, at < numel, other=0.0) + total
    tl.store(out_ptr + at, total, at < numel)


def pack_cuda(rows: Tensor, packed: Tensor, *, block: int, first_scale: int, limit: float) -> None:
    """`pack_int8`; scales begin at the byte `first_scale` of a row, and are made of magnitudes up to `limit`."""
    _launch(
        _pack,
        rows.shape[1],
        block,
        packed,
        rows,
        *_views(packed),
        rows.shape[1],
        packed.shape[1],
        first_scale // 4,
        limit,
    )


def unpack_cuda(packed: Tensor, rows: Tensor, *, block: int, first_scale: int) -> None:
    """`unpack_int8`."""
    _launch(
        _unpack, rows.shape[1], block, packed, *_views(packed), rows, rows.shape[1], packed.shape[1], first_scale // 4
    )


def sum_cuda(packed: Tensor, out: Tensor, *, accumulate: bool, block: int, first_scale: int) -> None:
    """`sum_packed`."""
    numel, (num_rows, row_bytes) = out.numel(), packed.shape
    arguments = (*_views(packed), out, num_rows, numel, row_bytes, first_scale // 4)
    _launch(_sum, numel, block, packed[:1], *arguments, ACCUMULATE=accumulate)


def _views(packed: Tensor) -> tuple[Tensor, Tensor]:
    return packed.view(torch.int8), packed.view(torch.float32)


def _launch(kernel, numel: int, block: int, grid_rows: Tensor, *arguments, **constants) -> None:
    programs = triton.cdiv(triton.cdiv(numel, block), _BLOCKS_A_PROGRAM)
    if not programs or not grid_rows.shape[0]:
        return
    with torch.cuda.device(grid_rows.device):
        kernel[(programs, grid_rows.shape[0])](
            *arguments, BLOCK=block, BLOCKS=_BLOCKS_A_PROGRAM, num_warps=8, enable_fp_fusion=False, **constants
        )
