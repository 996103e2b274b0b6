"""SGD and Lion over flat shards. Neighbours: `build.py` makes them, `ops/flat.py` has the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.ops.flat import lion_step, sgd_step
from raydz.optim.weights import WeightShard

_PIECE_NUMEL = 1 << 16  # temporaries of a piece stay in the cache; an accelerator takes the shard as one


def masters(weights: WeightShard, grad: Tensor, grad_scale: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Walk a shard: (elements, fp32 master, scaled fp32 gradient); the master may be changed and is then stored."""
    numel = weights.compute.numel()
    step = _PIECE_NUMEL if grad.device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, step):
        part = slice(start, min(start + step, numel))
        shard = weights.slice(part.start, part.stop)
        master = shard.master()
        yield part, master, grad[part].to(torch.float32) * grad_scale
        shard.store(master)


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum, as torch.optim.SGD: weight decay is added to the gradient."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

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
        buffer = state.get("momentum_buffer")
        for part, master, g in masters(weights, grad, grad_scale):
            sgd_step(
                master, g, None if buffer is None else buffer[part], lr=lr, weight_decay=weight_decay,
                momentum=self.momentum, dampening=self.dampening, nesterov=self.nesterov, is_first=step == 1,
            )  # fmt: skip


@dataclass(frozen=True)
class Lion:
    """The sign of an interpolated momentum, with decoupled weight decay. Source: Chen et al. 2023, algorithm 2."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    state_names = ("exp_avg",)

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
        for part, master, g in masters(weights, grad, grad_scale):
            lion_step(
                master, g, state["exp_avg"][part], lr=lr, beta1=self.beta1, beta2=self.beta2, weight_decay=weight_decay
            )
