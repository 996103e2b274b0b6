"""What a kernel accepts: flat, contiguous buffers of one length on one device. Layer 2.

Used by `adamw.py`, `rounding.py` and `reduction.py` before either implementation runs, so that the compiled kernels
and the references refuse the same calls with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raydz.errors import LayoutError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that gradients and activations come in."""

HALVES = (torch.bfloat16, torch.float16)
"""Types that 16-bit weights come in."""


def check_buffer(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], like: Tensor | None = None) -> None:
    """Refuse a buffer that is not contiguous, has another dtype, or differs from `like` in length or device.

    Raises:
        LayoutError: names the buffer, what it is and what was wanted.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise LayoutError("a buffer has the wrong dtype", where=name, got=tensor.dtype, wanted=wanted)
    if not tensor.is_contiguous():
        raise LayoutError("a buffer is not contiguous", where=name, got=f"strides {tensor.stride()}")
    if like is None:
        return
    if tensor.numel() != like.numel():
        raise LayoutError("buffers differ in length", where=name, got=tensor.numel(), wanted=like.numel())
    if tensor.device != like.device:
        raise LayoutError("buffers are on different devices", where=name, got=tensor.device, wanted=like.device)
