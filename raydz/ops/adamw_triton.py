"""`adamw_step` for NVIDIA GPUs: one pass over a shard, the bits of the torch reference. Layer 2.

Above: `adamw.py`, the only caller. Every operation rounds once: fusing into multiply-add is switched off at the launch,
division and root are the correctly rounded ones. Checked on a GPU by `tests/cuda/kernels_check.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _round_bf16(p):
    """The upper 16 bits of an fp32 value rounded half up in magnitude, as int32; see `rounding.split_master`."""
    bits = p.to(tl.int32, bitcast=True)
    return tl.where(p != p, (bits >> 16) | 0x0040, (bits + 0x8000) >> 16)


@triton.jit
def _adamw(
    master_ptr, low_ptr, grad_ptr, m_ptr, v_ptr, out_ptr, count_ptr, numel,
    grad_scale, decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, sqrt_bias2, eps, step_size,
    DECOUPLED: tl.constexpr, HAS_LOW: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32) * grad_scale
    m = tl.load(m_ptr + at, inside, other=0.0)
    v = tl.load(v_ptr + at, inside, other=0.0)
    if HAS_LOW:
        high = tl.load(master_ptr + at, inside, other=0).to(tl.int32)
        low = tl.load(low_ptr + at, inside, other=0).to(tl.int32)
        p = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        p = tl.load(master_ptr + at, inside, other=0.0)
    # Infinities and NaNs alone have all exponent bits set.
    is_bad = (g.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    bad = tl.sum(is_bad.to(tl.int32), 0)
    if bad > 0:
        tl.atomic_add(count_ptr, bad.to(tl.int64))
    if DECOUPLED:
        p = p * decay
    else:
        g = g + p * l2
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    denominator = tl.div_rn(tl.sqrt_rn(v), sqrt_bias2 + tl.zeros_like(v)) + eps
    p = p - tl.div_rn(m, denominator) * step_size
    tl.store(m_ptr + at, m, inside)
    tl.store(v_ptr + at, v, inside)
    if HAS_LOW:
        rounded = _round_bf16(p)
        remainder = p.to(tl.int32, bitcast=True) - (rounded << 16)
        tl.store(master_ptr + at, rounded.to(tl.int16), inside)
        tl.store(low_ptr + at, tl.where(p != p, 0, remainder).to(tl.int16), inside)
    else:
        tl.store(master_ptr + at, p, inside)
    if OUT == "bf16":
        tl.store(out_ptr + at, _round_bf16(p).to(tl.int16), inside)
    elif OUT == "fp16":
        tl.store(out_ptr + at, p.to(tl.float16), inside)


def adamw_cuda(buffers: Sequence[Tensor | None], scalars: Sequence[float], decoupled: bool) -> Tensor:
    """See `adamw.adamw_step`; the count is a 0-d int64 tensor, so that the host does not wait for it.

    Memory: 26 bytes an element move (bf16 gradient, split master), and no temporaries.
    """
    master, low, grad, exp_avg, exp_avg_sq, out = buffers
    assert master is not None
    count = torch.zeros((), dtype=torch.int64, device=master.device)
    numel = master.numel()
    if numel == 0:
        return count

    def as_bits(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return master  # a pointer that nothing reads
        tensor = tensor.detach()
        return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor

    kind = "" if out is None else "bf16" if out.dtype == torch.bfloat16 else "fp16"
    with torch.cuda.device(master.device):
        _adamw[(triton.cdiv(numel, _BLOCK),)](
            as_bits(master), as_bits(low), grad, exp_avg, exp_avg_sq, as_bits(out), count, numel, *scalars,
            DECOUPLED=decoupled, HAS_LOW=low is not None, OUT=kind, BLOCK=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return count
