"""Optimizers over flat shards: pure state transitions, the step number an argument.

Neighbours: `zero/update.py` walks the segments and calls `update`; `ops/adamw.py` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raydz.errors import ConfigError
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
        adamw_step(
            weights.compute, grad, state["exp_avg"], state["exp_avg_sq"], low=weights.low, lr=lr, beta1=self.beta1,
            beta2=self.beta2, eps=self.eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale,
            decoupled=self.decoupled, threads=self.threads,
        )  # fmt: skip


def build_optimizer(name: str, *, threads: int | None = None, **params) -> Optimizer:
    """Build an optimizer from DeepSpeed's name and parameters (`Adam` means AdamW unless `adam_w_mode` is false).

    Raises:
        ConfigError: the name is not known.
    """
    if name.lower() not in ("adam", "adamw"):
        raise ConfigError("unknown optimizer", where="optimizer.type", got=name, wanted="AdamW or Adam")
    beta1, beta2 = params.get("betas", (0.9, 0.999))
    return AdamW(
        lr=params.get("lr", 1e-3), beta1=beta1, beta2=beta2, eps=params.get("eps", 1e-8),
        weight_decay=params.get("weight_decay", 0.0),
        decoupled=name.lower() == "adamw" or params.get("adam_w_mode", True),
        threads=threads or torch.get_num_threads(),
    )  # fmt: skip
