"""Causal attention within documents, by the fastest kernel that PyTorch has for the device, dtype and mask.

Neighbours: `decoder.py` calls `attend` in every block; `train/setup.py` and `raydz report` say what `choose` finds.
See "Attention kernels" in README.md.

Shapes: B rows, T positions, H heads, K key-value heads, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash (cpu)",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_fused_attention_overrideable": "fused by the device's backend",
}
PLAIN = "plain"
_PROBE_LENGTH = 128


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, repeats_heads: bool = False) -> Tensor:
    """Mix the values: causally, or where `mask` is True.

    Shape: q (B, H, T, E), k and v (B, K, T, E), mask (B, 1, T, T) -> (B, H, T, E).

    Args:
        repeats_heads: give every head keys and values of its own, for a kernel that cannot share them.
    """
    groups = q.shape[1] // k.shape[1]
    if repeats_heads and groups > 1:
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1)


def document_mask(document_ids: Tensor) -> Tensor:
    """True where a query may see a key: not later, and in the same document. Shape: (B, T) -> (B, 1, T, T)."""
    t = document_ids.shape[1]
    causal = torch.ones(t, t, dtype=torch.bool, device=document_ids.device).tril()
    return (document_ids[:, None, :, None] == document_ids[:, None, None, :]) & causal


@dataclass(frozen=True)
class AttentionCase:
    """What the choice of a kernel depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    masked: bool


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel that runs, and whether heads must be repeated for it. Only "plain" makes scores of (B, H, T, T)."""

    kernel: str
    repeats_heads: bool


@cache
def choose(case: AttentionCase) -> AttentionChoice:
    """The choice for training: what PyTorch takes for shared heads, unless only repeated ones escape the plain kernel.

    Seen by running one short row of zeros, not guessed. Call it outside of blocks: what they run is recorded.
    """
    kernel = _seen_kernel(case, repeats_heads=False)
    if kernel == PLAIN and case.num_heads != case.num_kv_heads:
        repeated = _seen_kernel(case, repeats_heads=True)
        if repeated != PLAIN:
            return AttentionChoice(repeated, True)
    return AttentionChoice(kernel, False)


def _seen_kernel(case: AttentionCase, *, repeats_heads: bool) -> str:
    q, k, v = (
        torch.zeros(1, heads, _PROBE_LENGTH, case.head_dim, dtype=case.dtype, device=case.device, requires_grad=True)
        for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    )
    mask = document_mask(torch.zeros(1, _PROBE_LENGTH, dtype=torch.long, device=case.device)) if case.masked else None
    with torch.enable_grad(), _SeenKernels() as seen:
        attend(q, k, v, mask, repeats_heads=repeats_heads)
    return seen.names[0] if seen.names else PLAIN


class _SeenKernels(TorchDispatchMode):
    """Collects the attention kernels that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _KERNELS:
            self.names.append(_KERNELS[name])
        return func(*args, **(kwargs or {}))
