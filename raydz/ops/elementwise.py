"""One step of Lion or SGD on a flat shard, in one pass where there is a kernel. Layer 2.

Above: `raydz.optim`. Below: `flat.py` defines the arithmetic, `native/lion.hpp` and `native/sgd.hpp` repeat it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raydz.ops.batch import Batch, run_or_note
from raydz.ops.flat import lion_step, sgd_step
from raydz.ops.native import kernels_for
from raydz.ops.operands import Into, Operands, walk
from raydz.ops.stochastic import Noise


@torch.no_grad()
def lion_update(
    operands: Operands, *, lr: float, beta1: float, beta2: float, weight_decay: float, grad_scale: float = 1.0,
    noise: Noise | None = None, threads: int = 1, into: Into | None = None, batch: Batch | None = None,
) -> int | Tensor:  # fmt: skip
    """Update master and `exp_avg`, the one state, in place; returns how many scaled gradients are not finite.

    Args:
        noise: what rounds masters and states that are bf16 alone.
        threads: at most so many, for host memory; the result does not depend on it.
        into, batch: as in `adamw_step`.

    Raises:
        LayoutError: a dtype, a length or a device does not fit.
    """
    operands.check(("exp_avg",), has_noise=noise is not None, into=into)
    if kernels := kernels_for(operands.master):
        scalars = (grad_scale, 1.0 - lr * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr)
        return run_or_note(kernels.lion(*operands.for_kernel(), scalars, noise, into), threads, batch)

    def update(p: Tensor, g: Tensor, exp_avg: Tensor) -> None:
        lion_step(p, g, exp_avg, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)

    return walk(operands.copied(into), grad_scale, noise, update)


@torch.no_grad()
def sgd_update(
    operands: Operands, *, lr: float, weight_decay: float, momentum: float, dampening: float, nesterov: bool,
    is_first: bool, grad_scale: float = 1.0, noise: Noise | None = None, threads: int = 1, into: Into | None = None,
    batch: Batch | None = None,
) -> int | Tensor:  # fmt: skip
    """Update master and `momentum_buffer`, the one state (none without momentum), in place.

    Returns how many scaled gradients are not finite. What is not named here is as in `lion_update`.
    """
    names = ("momentum_buffer",)[: len(operands.states)]
    operands.check(names, has_noise=noise is not None, into=into)
    if kernels := kernels_for(operands.master):
        master, low, grad, *buffer, out = operands.for_kernel()
        scalars = (grad_scale, weight_decay, momentum, 1.0 - dampening, lr)
        form = (weight_decay != 0.0, nesterov, is_first)
        parts = (master, low, grad, buffer[0] if buffer else None, out)
        return run_or_note(kernels.sgd(*parts, scalars, *form, noise, into), threads, batch)

    def update(p: Tensor, g: Tensor, buffer: Tensor | None = None) -> None:
        sgd_step(
            p, g, buffer, lr=lr, weight_decay=weight_decay, momentum=momentum, dampening=dampening,
            nesterov=nesterov, is_first=is_first,
        )  # fmt: skip

    return walk(operands.copied(into), grad_scale, noise, update)
