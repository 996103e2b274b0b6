"""Optimizers over flat shards: pure state transitions, the step number an argument.

Neighbours: `zero/update.py` walks the segments and calls `update`; `ops/adamw.py` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from raydz.ops.adamw import adamw_step
from raydz.ops.batch import Batch
from raydz.ops.operands import Into
from raydz.ops.stochastic import Noise
from raydz.optim.weights import WeightShard


@dataclass(frozen=True)
class Update:
    """What one step does to elements with the same settings.

    Args:
        step: number of the step, from 1.
        grad_scale: multiplied into the gradient first: clipping, loss scale.
        noise: what rounds bf16 weights and states, only for an optimizer that takes it.
        into: second buffers for what is updated in place else, only for one that takes noise.
        batch: where the kernels note the step instead of making it.
    """

    step: int
    lr: float
    weight_decay: float = 0.0
    grad_scale: float = 1.0
    noise: Noise | None = None
    into: Into | None = None
    batch: Batch | None = None


class Optimizer(Protocol):
    """What the engine needs of an optimizer; it never learns how shards lie in memory."""

    @property
    def state_names(self) -> tuple[str, ...]: ...

    @property
    def lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def takes_noise(self) -> bool:
        """Whether `update` can round bf16 weights and states itself, see `Widening.update`."""

    def update(self, weights: WeightShard, grad: Tensor, state: dict[str, Tensor], now: Update) -> None:
        """Advance `weights` and `state` in place by one step.

        Shape: all (n,). Dtype: grad fp32, bf16 or fp16; state fp32, with `now.noise` bf16, too.
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
    takes_noise = True

    def update(self, weights: WeightShard, grad: Tensor, state: dict[str, Tensor], now: Update) -> None:
        parts = weights.operands(grad)
        adamw_step(
            parts.master, grad, state["exp_avg"], state["exp_avg_sq"], low=parts.low, out=parts.out, lr=now.lr,
            beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=now.weight_decay, step=now.step,
            grad_scale=now.grad_scale, decoupled=self.decoupled, bias_correction=self.bias_correction,
            noise=now.noise, into=now.into, batch=now.batch, threads=self.threads,
        )  # fmt: skip
