"""Flat floats as int8 with one fp32 scale a block, for the wire: torch, which defines the result, or Triton. Layer 2.

Above: `raydz.dist` (gradients), `raydz.zero` (weights). See "Int8 blocks" in README.md for format and error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from raydz.errors import LayoutError
from raydz.ops.buffers import FLOATS, check_buffer
from raydz.ops.native import has_triton

BLOCK = 256
"""Consecutive elements that share a scale; the last block of a row may be shorter."""
_QUANTUM = 16  # bytes: rows and scales start at multiples of it
_LARGEST_CODE = 127.0
_NOT_FINITE = -128.0
_LARGEST_SCALED = torch.finfo(torch.float32).max * (1 - 2**-22)  # so that 127 scales stay finite
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 17, 1 << 22  # elements whose fp32 intermediates exist at once


def packed_bytes(numel: int) -> int:
    """Bytes of a packed row of `numel` elements."""
    return _aligned(_aligned(numel) + 4 * -(-numel // BLOCK))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _QUANTUM) * _QUANTUM


@torch.no_grad()
def pack_int8(rows: Tensor, packed: Tensor) -> Tensor:
    """Round each row to int8, block by block; returns `packed`.

    Shape: rows (num_rows, n), packed (num_rows, packed_bytes(n)); contiguous. Dtype: rows fp32, bf16 or fp16; packed
    uint8. An element that is not finite comes back as NaN, and does not disturb its block.

    Raises:
        LayoutError: a shape, dtype or device does not fit.
    """
    _check(packed, rows.numel() // max(1, rows.shape[0]), rows, FLOATS)
    if rows.is_cuda and has_triton():
        from raydz.ops.quantise_triton import pack_cuda

        pack_cuda(rows, packed, block=BLOCK, first_scale=_aligned(rows.shape[1]), limit=_LARGEST_SCALED)
    else:
        _pack_reference(rows, packed)
    return packed


@torch.no_grad()
def unpack_int8(packed: Tensor, rows: Tensor) -> Tensor:
    """Undo `pack_int8` up to rounding; returns `rows`, of any of its dtypes."""
    _check(packed, rows.numel() // max(1, rows.shape[0]), rows, FLOATS)
    if rows.is_cuda and has_triton():
        from raydz.ops.quantise_triton import unpack_cuda

        unpack_cuda(packed, rows, block=BLOCK, first_scale=_aligned(rows.shape[1]))
        return rows
    for columns, codes, scales in _stretches(packed, rows.shape[1]):
        rows[:, columns] = _values(codes, scales).flatten(1)
    return rows


@torch.no_grad()
def sum_packed(packed: Tensor, out: Tensor, *, accumulate: bool = False) -> Tensor:
    """`sum_rows` of packed rows: fp32, strictly in row order; with `accumulate`, added to `out`.

    Shape: packed (num_rows, packed_bytes(n)), out (n,). Dtype: uint8, fp32.

    Raises:
        LayoutError: a shape, dtype or device does not fit.
    """
    _check(packed, out.numel(), out, (torch.float32,))
    if out.is_cuda and has_triton():
        from raydz.ops.quantise_triton import sum_cuda

        sum_cuda(packed, out, accumulate=accumulate, block=BLOCK, first_scale=_aligned(out.numel()))
        return out
    for columns, codes, scales in _stretches(packed, out.numel()):
        total = _values(codes[0], scales[0])
        for row in range(1, packed.shape[0]):
            total += _values(codes[row], scales[row])
        flat = total.flatten()
        out[columns] = out[columns] + flat if accumulate else flat
    return out


def _pack_reference(rows: Tensor, packed: Tensor) -> None:
    # by a tensor: a scalar may become a product with its reciprocal, see "One arithmetic" in README.md
    largest_code = torch.full((1,), _LARGEST_CODE, dtype=torch.float32, device=rows.device)
    for columns, codes, scales in _stretches(packed, rows.shape[1]):
        blocks = rows[:, columns].reshape(codes.shape).float()
        magnitudes = blocks.abs()
        is_finite = magnitudes < torch.inf
        largest = torch.where(is_finite, magnitudes, 0.0).amax(-1)
        scales.copy_(largest.clamp_(max=_LARGEST_SCALED) / largest_code)
        divisors = torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
        rounded = (blocks / divisors).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        codes.copy_(torch.where(is_finite, rounded, _NOT_FINITE))


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes * scales.unsqueeze(-1)).masked_fill_(codes == _NOT_FINITE, torch.nan)


def _stretches(packed: Tensor, numel: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Columns of the rows, their codes (num_rows, blocks, block) and scales (num_rows, blocks), views of `packed`."""
    if not numel:
        return
    all_scales = packed[:, _aligned(numel) :].view(torch.float32)
    whole = numel // BLOCK * BLOCK
    limit = _CPU_CHUNK if packed.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, limit // max(1, packed.shape[0]) // BLOCK) * BLOCK
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        codes = packed[:, start:stop].view(torch.int8).unflatten(1, (-1, BLOCK))
        yield slice(start, stop), codes, all_scales[:, start // BLOCK : stop // BLOCK]
    if numel > whole:
        codes = packed[:, whole:numel].view(torch.int8).unsqueeze(1)
        yield slice(whole, numel), codes, all_scales[:, whole // BLOCK : whole // BLOCK + 1]


def _check(packed: Tensor, numel: int, like: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    check_buffer("values", like, dtypes)
    check_buffer("packed", packed, (torch.uint8,))
    num_rows = like.shape[0] if like.dim() == 2 else packed.shape[0]
    if packed.dim() != 2 or packed.shape != (num_rows, packed_bytes(numel)) or packed.device != like.device:
        raise LayoutError(
            "a packed buffer does not fit its values", where="packed", got=f"{tuple(packed.shape)} on {packed.device}",
            wanted=f"({num_rows}, {packed_bytes(numel)}) on {like.device}",
        )  # fmt: skip
