"""Optimizers over flat shards: pure state transitions, the step number an argument.

Neighbours: `zero/update.py` walks the segments and calls `update`; `ops/adamw.py` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from raydz.ops.adamw import adamw_step
from raydz.optim.weights import WeightShard


class Optimizer(Protocol):
    """What the engine needs of an optimizer; it never learns how shards lie in memory."""

    @property
    def state_names(self) -> tuple[str, ...]: ...

    @property
    def lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    def update(
        self,
        weights: WeightShard,
        grad: Tensor,
        state: dict[str, Tensor],
        *,
        step: int,
        lr: float,
        weight_decay: float,
        grad_scale: float,
    ) -> None:
        """Advance `weights` and `state` in place by one step.

        Shape: all (n,). Dtype: grad fp32, bf16 or fp16; state fp32.
        Units: step counts from 1; grad is multiplied by `grad_scale` first.
        """


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, or with L2 decay in the gradient (`decoupled=False`).

    Source: Loshchilov and Hutter 2019, algorithm 2; separately rounded fp32 operations, see `ops/adamw.py`.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    bias_correction: bool = True
    threads: int = 1
    state_names = ("exp_avg", "exp_avg_sq")

    def update(
        self,
        weights: WeightShard,
        grad: Tensor,
        state: dict[str, Tensor],
        *,
        step: int,
        lr: float,
        weight_decay: float,
        grad_scale: float,
    ) -> None:
        master, out = weights.compute, None
        if weights.separate is not None:
            master, out = weights.separate, weights.compute
        adamw_step(
            master, grad, state["exp_avg"], state["exp_avg_sq"], low=weights.low, out=out, lr=lr, beta1=self.beta1,
            beta2=self.beta2, eps=self.eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale,
            decoupled=self.decoupled, bias_correction=self.bias_correction, threads=self.threads,
        )  # fmt: skip
