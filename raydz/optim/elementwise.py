"""SGD and Lion over flat shards. Neighbours: `build.py` makes them, `ops/elementwise.py` runs them in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.ops.elementwise import lion_update, sgd_update
from raydz.optim.optimizer import Update
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
    threads: int = 1
    takes_noise = True

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def update(self, weights: WeightShard, grad: Tensor, state: dict[str, Tensor], now: Update) -> None:
        sgd_update(
            weights.operands(grad, *(state[name] for name in self.state_names)), lr=now.lr,
            weight_decay=now.weight_decay, momentum=self.momentum, dampening=self.dampening, nesterov=self.nesterov,
            is_first=now.step == 1, grad_scale=now.grad_scale, noise=now.noise, into=now.into, batch=now.batch,
            threads=self.threads,
        )  # fmt: skip


@dataclass(frozen=True)
class Lion:
    """The sign of an interpolated momentum, with decoupled weight decay. Source: Chen et al. 2023, algorithm 2."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    threads: int = 1
    state_names = ("exp_avg",)
    takes_noise = True

    def update(self, weights: WeightShard, grad: Tensor, state: dict[str, Tensor], now: Update) -> None:
        lion_update(
            weights.operands(grad, state["exp_avg"]), lr=now.lr, beta1=self.beta1, beta2=self.beta2,
            weight_decay=now.weight_decay, grad_scale=now.grad_scale, noise=now.noise, into=now.into,
            batch=now.batch, threads=self.threads,
        )  # fmt: skip
