"""Sums whose order is part of the contract, so that they never depend on machine, width or threads. Layer 2.

Above: `raydz.dist` (rank-ordered reduce), `raydz.optim` (global norm). Below: `native/reduction.hpp`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raydz.errors import LayoutError
from raydz.ops.buffers import FLOATS, check_buffer
from raydz.ops.native import has_triton, kernels_for

_BLOCK = 4096  # as kReductionBlock in native/kernels.hpp: changing it changes results
_LANES = 16
_GROUP_NUMEL = 256 * _BLOCK  # the reference holds the fp64 squares of so many elements at once


@torch.no_grad()
def sum_squares(values: Tensor, *, threads: int = 1) -> float:
    """Sum of squares in fp64; not finite exactly if an element is not.

    Order: within each block of 4096 elements, lane j of 16 adds elements j, 16 + j, 32 + j, …; the lanes are folded
    in halves; block sums are added in order. fp32 squares are exact in fp64, and 2e19 squared does not overflow.

    Dtype: fp32, bf16 or fp16. Blocking: waits for the device.

    Raises:
        LayoutError: another dtype, or not contiguous.
    """
    return sum_squares_of_all([values], threads=threads)[0]


@torch.no_grad()
def sum_squares_of_all(tensors: Sequence[Tensor], *, threads: int = 1) -> list[float]:
    """`sum_squares` of each. Blocking: waits for the device once."""
    for values in tensors:
        check_buffer("values", values, FLOATS)
    if not tensors:
        return []
    if kernels := kernels_for(tensors[0]):
        return [kernels.sum_squares(values.detach(), threads) for values in tensors]
    return sum_squares_reference(tensors)


@torch.no_grad()
def begin_squares(values: Tensor) -> Tensor:
    """What `finish_squares` makes `sum_squares` of: a few fp64 numbers; nothing reads `values` after that.

    Raises: as `sum_squares`.
    """
    check_buffer("values", values, FLOATS)
    if kernels := kernels_for(values):
        return torch.tensor([kernels.sum_squares(values.detach(), 1)], dtype=torch.float64)
    return _block_sums(values.detach().view(-1))


def finish_squares(parts: Sequence[Tensor]) -> list[float]:
    """`sum_squares` of each tensor that `begin_squares` was given. Blocking: waits for the device once."""
    if not parts:
        return []
    everything = torch.cat(list(parts)).cpu().numpy()
    ends = np.cumsum([0, *(part.numel() for part in parts)])
    # cumsum adds one after the other, which neither numpy's sum nor (since 3.12) Python's does.
    return [
        float(np.cumsum(everything[start:stop])[-1]) if stop > start else 0.0
        for start, stop in itertools.pairwise(ends)
    ]


@torch.no_grad()
def sum_rows(rows: Tensor, out: Tensor, *, accumulate: bool = False, threads: int = 1) -> Tensor:
    """`out = rows[0] + rows[1] + …` in fp32, strictly in row order; with `accumulate`, `out = out + that sum`.

    Shape: rows (num_rows, n) with contiguous rows at any distance, out (n,). They must not overlap.
    Dtype: rows fp32, bf16 or fp16; out fp32.

    Raises:
        LayoutError: a shape, dtype or device does not fit.
    """
    if rows.dim() != 2 or rows.shape[0] < 1:
        raise LayoutError("not a matrix with at least one row", where="rows", got=tuple(rows.shape))
    check_buffer("rows", rows[0], FLOATS)
    check_buffer("out", out, (torch.float32,), like=rows[0])
    if kernels := kernels_for(rows):
        kernels.sum_rows(rows.detach(), out.detach(), accumulate, threads)
    else:
        sum_rows_reference(rows, out, accumulate)
    return out


def sum_squares_reference(tensors: Sequence[Tensor]) -> list[float]:
    """`sum_squares_of_all` in torch (and Triton): the same lanes, all blocks side by side."""
    return finish_squares([_block_sums(values.detach().view(-1)) for values in tensors])


def sum_rows_reference(rows: Tensor, out: Tensor, accumulate: bool) -> None:
    """`sum_rows` in torch."""
    total = rows[0].to(torch.float32)
    for row in rows[1:]:
        total = total + row.to(torch.float32)
    flat = out.view(-1)
    flat.copy_(flat + total if accumulate else total)


def _block_sums(flat: Tensor) -> Tensor:
    """One fp64 sum a block."""
    if flat.is_cuda and has_triton():
        from raydz.ops.reduction_triton import lane_sums_cuda

        return _folded(lane_sums_cuda(flat, _BLOCK, _LANES))
    pieces = [_lane_sums(flat[at : at + _GROUP_NUMEL]) for at in range(0, flat.numel(), _GROUP_NUMEL)]
    return _folded(torch.cat(pieces) if pieces else flat.new_zeros(0, _LANES, dtype=torch.float64))


def _lane_sums(flat: Tensor) -> Tensor:
    """(blocks, 16); zeros that fill the last block change no sum, since no lane is ever -0."""
    num_blocks = -(-flat.numel() // _BLOCK)
    padded = torch.zeros(num_blocks * _BLOCK, dtype=torch.float64, device=flat.device)
    padded[: flat.numel()].copy_(flat)
    squares = (padded * padded).view(num_blocks, _BLOCK // _LANES, _LANES)
    lanes = torch.zeros(num_blocks, _LANES, dtype=torch.float64, device=flat.device)
    for group in squares.unbind(1):
        lanes = lanes + group
    return lanes


def _folded(lanes: Tensor) -> Tensor:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes.view(-1)
