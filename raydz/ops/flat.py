"""Single steps of optimizers that work element by element, on flat fp32 tensors. Layer 2.

Above: `elementwise.py`, whose kernels give the same bits; `raydz.optim.muon`. Plain operators only, each rounded once:
the bits depend neither on where a piece is cut nor on the device (README.md, "One arithmetic").
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def sgd_step(
    p: Tensor, g: Tensor, buffer: Tensor | None, *, lr: float, weight_decay: float, momentum: float, dampening: float,
    nesterov: bool, is_first: bool,
) -> None:  # fmt: skip
    """Update `p` and `buffer` (None without momentum) in place; in the first step the buffer is the gradient.

    Shape: all (n,). Source: torch.optim.SGD's documentation.
    """
    if weight_decay:
        g = g + p * weight_decay
    if buffer is not None:
        buffer.copy_(g if is_first else buffer * momentum + g * (1.0 - dampening))
        g = g + buffer * momentum if nesterov else buffer
    p.copy_(p - g * lr)


@torch.no_grad()
def lion_step(
    p: Tensor, g: Tensor, exp_avg: Tensor, *, lr: float, beta1: float, beta2: float, weight_decay: float
) -> None:
    """Update `p` and `exp_avg` in place.

    Shape: all (n,). Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2.
    """
    direction = (exp_avg * beta1 + g * (1.0 - beta1)).sign()
    p.copy_(p * (1.0 - lr * weight_decay) - direction * lr)
    exp_avg.copy_(exp_avg * beta2 + g * (1.0 - beta2))


@torch.no_grad()
def decayed_step(p: Tensor, direction: Tensor, *, lr: float, decay: float) -> None:
    """`p = p * decay - lr * direction` in place, in fp32 whatever the direction's dtype. Shape: all (n,)."""
    p.copy_(p * decay - direction.to(torch.float32) * lr)
