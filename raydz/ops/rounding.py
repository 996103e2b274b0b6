"""fp32 masters as a bf16 weight and a 16-bit remainder. Layer 2.

**Every** cast from fp32 to bf16 weights in raydz uses this rounding, whether the remainder is kept or not. Above:
`adamw.py`, `raydz.zero`, `raydz.checkpoint`. Below: `native/rounding.hpp`, which has the same three functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raydz.ops.buffers import check_buffer
from raydz.ops.native import kernels_for

_FP32, _BF16, _INT16 = (torch.float32,), (torch.bfloat16,), (torch.int16,)


@torch.no_grad()
def split_master(
    master: Tensor, hi: Tensor | None = None, low: Tensor | None = None, *, threads: int = 1
) -> tuple[Tensor, Tensor]:
    """Split fp32 values into bf16 weights `hi` and int16 remainders `low`, from which they can be rebuilt exactly.

    `hi` rounds half up in magnitude (torch rounds half to even), because only then the remainder always fits int16.
    Exact for every finite value and both infinities. A finite value above bf16's largest gives an infinite `hi`, as
    any rounding to bf16 does, and still comes back. A NaN keeps its sign and the upper seven payload bits, is made
    quiet and gets remainder 0: without that, some payloads would round to infinity or to -0.

    Shape: all of `master`'s shape, contiguous. `hi` and `low` are allocated where not given.

    Raises:
        LayoutError: a dtype, a length or a device does not fit.
    """
    check_buffer("master", master, _FP32)
    hi = torch.empty_like(master, dtype=torch.bfloat16) if hi is None else hi
    low = torch.empty_like(master, dtype=torch.int16) if low is None else low
    check_buffer("hi", hi, _BF16, master)
    check_buffer("low", low, _INT16, master)
    if kernels := kernels_for(master):
        kernels.split(master.detach(), hi.detach(), low.detach(), threads)
    else:
        split_reference(master, hi, low)
    return hi, low


@torch.no_grad()
def merge_master(hi: Tensor, low: Tensor, out: Tensor | None = None, *, threads: int = 1) -> Tensor:
    """The fp32 values that `split_master` took apart.

    Shape: all of `hi`'s shape, contiguous. `out` is allocated where not given.

    Raises:
        LayoutError: a dtype, a length or a device does not fit.
    """
    check_buffer("hi", hi, _BF16)
    check_buffer("low", low, _INT16, hi)
    out = torch.empty_like(hi, dtype=torch.float32) if out is None else out
    check_buffer("out", out, _FP32, hi)
    if kernels := kernels_for(hi):
        kernels.merge(hi.detach(), low.detach(), out.detach(), threads)
    else:
        merge_reference(hi, low, out)
    return out


@torch.no_grad()
def round_bf16(source: Tensor, out: Tensor | None = None, *, threads: int = 1) -> Tensor:
    """Cast fp32 to bf16 as `split_master` does, without the remainder.

    Raises:
        LayoutError: a dtype, a length or a device does not fit.
    """
    check_buffer("source", source, _FP32)
    out = torch.empty_like(source, dtype=torch.bfloat16) if out is None else out
    check_buffer("out", out, _BF16, source)
    if kernels := kernels_for(source):
        kernels.round(source.detach(), out.detach(), threads)
    else:
        round_reference(source, out)
    return out


def split_reference(master: Tensor, hi: Tensor, low: Tensor) -> None:
    """`split_master` in torch: int32 arithmetic stands in for uint32, whose bits are the same."""
    round_reference(master, hi)
    bits = master.view(torch.int32).view(-1)
    remainder = bits - (hi.view(torch.int16).view(-1).to(torch.int32) << 16)
    low.view(-1).copy_(torch.where(master.view(-1).isnan(), 0, remainder).to(torch.int16))


def merge_reference(hi: Tensor, low: Tensor, out: Tensor) -> None:
    """`merge_master` in torch."""
    upper = hi.view(torch.int16).view(-1).to(torch.int32) << 16
    out.view(torch.int32).view(-1).copy_(upper + low.view(-1).to(torch.int32))


def round_reference(source: Tensor, out: Tensor) -> None:
    """`round_bf16` in torch."""
    bits = source.view(torch.int32).view(-1)
    rounded = torch.where(source.view(-1).isnan(), (bits >> 16) | 0x0040, (bits + 0x8000) >> 16)
    out.view(torch.int16).view(-1).copy_(rounded.to(torch.int16))
