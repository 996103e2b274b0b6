"""One step of AdamW (or Adam) on a flat shard: unscale, update, cast the weight, count non-finite gradients. Layer 2.

Above: `raydz.optim`, which owns the step count and the schedule. Below: `native/adamw.hpp`, the same operations in
the same order; README.md "One arithmetic" says why the bits agree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from raydz.errors import ConfigError
from raydz.ops.batch import Batch, run_or_note
from raydz.ops.native import has_triton, kernels_for
from raydz.ops.operands import Into, Operands, walk
from raydz.ops.stochastic import Noise


class Buffers(NamedTuple):
    """What a step reads and writes, in the order of `raydz._native.adamw`."""

    master: Tensor
    low: Tensor | None
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    out: Tensor | None

    @classmethod
    def of(cls, o: Operands) -> Buffers:
        exp_avg, exp_avg_sq = o.states
        return cls(o.master, o.low, o.grad, exp_avg, exp_avg_sq, o.out)

    def operands(self) -> Operands:
        return Operands(self.master, self.grad, (self.exp_avg, self.exp_avg_sq), self.low, self.out)


class Scalars(NamedTuple):
    """The numbers of one step, each computed in double and rounded to fp32 once; order as in `native/kernels.hpp`."""

    grad_scale: float
    decay: float
    l2: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    sqrt_bias2: float
    eps: float
    step_size: float


@torch.no_grad()
def adamw_step(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    low: Tensor | None = None,
    out: Tensor | None = None,
    decoupled: bool = True,
    bias_correction: bool = True,
    noise: Noise | None = None,
    threads: int = 1,
    into: Into | None = None,
    batch: Batch | None = None,
) -> int | Tensor:
    """Update `master`, `exp_avg` and `exp_avg_sq` in place and return how many scaled gradients are not finite.

    The update is made whatever that count is: who wants to skip such a step decides before it, from the norm. On an
    accelerator the count is a 0-d tensor, so that the host does not wait for it.

    Shape, dtype: as `Operands` has them, the two moments its states.

    Args:
        step: this step's number, from 1 on; the function keeps no state.
        grad_scale: multiplied into the gradient first: 1 / loss scale, times the clip factor.
        decoupled: weight decay shrinks the weight (AdamW); otherwise it is added to the gradient (Adam).
        bias_correction: make up for moments that begin at zero.
        noise: what rounds masters and moments that are bf16 alone.
        threads: at most so many, for host memory; the result does not depend on it.
        into: write there instead, with the same bits: `master`, `low` and the moments stay as they are. The kernels
            write it in the same pass, past the caches; elsewhere it is a copy first.
        batch: on host memory with kernels the step is only noted there, for `batch.run`, and 0 is returned.

    Raises:
        LayoutError: a dtype, a length or a device does not fit.
        ConfigError: `step` or a beta is out of range.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """
    buffers = Buffers(master, low, grad, exp_avg, exp_avg_sq, out)
    buffers.operands().check(("exp_avg", "exp_avg_sq"), has_noise=noise is not None, into=into)
    scalars = step_scalars(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
        decoupled=decoupled,
        bias_correction=bias_correction,
    )
    if kernels := kernels_for(master):
        step_of_all = kernels.adamw(*buffers.operands().for_kernel(), scalars, decoupled, noise, into)
        return run_or_note(step_of_all, threads, batch)
    buffers = Buffers.of(buffers.operands().copied(into))
    if master.is_cuda and has_triton() and noise is None:
        from raydz.ops.adamw_triton import adamw_cuda

        return adamw_cuda(buffers, scalars, decoupled)
    return adamw_reference(buffers, scalars, decoupled, noise)


def step_scalars(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    bias_correction: bool = True,
) -> Scalars:
    """The fp32 scalars of a step, for every implementation of it.

    Raises:
        ConfigError: `step` is below 1 or a beta outside [0, 1).
    """
    if step < 1:
        raise ConfigError("optimizer steps count from 1", where="step", got=step, wanted=">= 1")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ConfigError("an AdamW beta is out of range", where=name, got=beta, wanted="0 <= beta < 1")
    exact = Scalars(
        grad_scale=grad_scale,
        decay=1.0 - lr * weight_decay if decoupled else 1.0,
        l2=0.0 if decoupled else weight_decay,
        beta1=beta1,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        sqrt_bias2=math.sqrt(1.0 - beta2**step) if bias_correction else 1.0,
        eps=eps,
        step_size=lr / (1.0 - beta1**step) if bias_correction else lr,
    )
    return Scalars(*(float(numpy.float32(value)) for value in exact))


def adamw_reference(buffers: Buffers, scalars: Scalars, decoupled: bool, noise: Noise | None = None) -> int | Tensor:
    """`adamw_step` in torch, on any device: what the kernels must agree with, bit for bit."""

    def update(p: Tensor, g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        _update(p, g, exp_avg, exp_avg_sq, scalars, decoupled)

    return walk(buffers.operands(), scalars.grad_scale, noise, update)


def _update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: Scalars, decoupled: bool) -> None:
    """In place on `p`, `m`, `v`. Plain operators only: `addcmul` and `alpha=` may fuse, and so round once less."""
    # A division by a Python number may become a product with its reciprocal (CUDA); by a tensor it never does.
    sqrt_bias2 = torch.full((1,), s.sqrt_bias2, dtype=torch.float32, device=p.device)
    if decoupled:
        p.copy_(p * s.decay)
    else:
        g = g + p * s.l2
    m.copy_(m * s.beta1 + g * s.one_minus_beta1)
    v.copy_(v * s.beta2 + (g * g) * s.one_minus_beta2)
    denominator = _sqrt(v) / sqrt_bias2 + s.eps
    p.copy_(p - (m / denominator) * s.step_size)


def _sqrt(v: Tensor) -> Tensor:
    """The correctly rounded fp32 root, which `Tensor.sqrt` is not where torch hands it to MKL: one ulp off, often.

    Through fp64 it is: the root of an fp32 number lies at least 4 fp64 ulps from where fp32's rounding would turn.
    """
    return v.to(torch.float64).sqrt().to(torch.float32)
