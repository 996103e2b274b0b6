"""Muon for matrices, AdamW for the rest: the arithmetic. Neighbours: `zero/matrices.py` brings matrices together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.ops.flat import decayed_step
from raydz.ops.orthogonal import orthogonalise
from raydz.optim.elementwise import masters
from raydz.optim.optimizer import AdamW, Update
from raydz.optim.weights import WeightShard


@dataclass(frozen=True)
class Muon:
    """Momentum, made nearly orthogonal as a whole matrix, with decoupled weight decay.

    Args:
        muon_lr, adam_lr: rates of the two families where they differ from `lr`; the schedule scales both.
        ns_method: `gram` or `standard`, see `ops/orthogonal.py`.
        rest: what updates the other parameters.

    Source: https://kellerjordan.github.io/posts/muon/, as torch.optim.Muon with its default `adjust_lr_fn`.
    """

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_method: str
    ns_steps: int
    rest: AdamW
    muon_lr: float | None = None
    adam_lr: float | None = None
    matrix_state_names = ("momentum_buffer",)
    takes_noise = True

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.rest.state_names

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype in which directions and updates travel: no rounding that the iteration itself does not make."""
        return torch.bfloat16 if self.ns_method == "standard" else torch.float32

    def update(self, weights: WeightShard, grad: Tensor, state: dict[str, Tensor], now: Update) -> None:
        """The update of what is no matrix."""
        self.rest.update(weights, grad, state, now)

    @torch.no_grad()
    def direction(self, grad: Tensor, state: dict[str, Tensor], *, grad_scale: float) -> Tensor:
        """Advance the momentum of part of a matrix, and what is to be made orthogonal of it.

        Shape: all (n,). Dtype: `wire_dtype` out, state fp32.
        """
        buffer = state["momentum_buffer"]
        g = grad.to(torch.float32) * grad_scale
        buffer.copy_(buffer + (g - buffer) * (1.0 - self.momentum))
        if self.nesterov:
            g = buffer - (buffer - g) * (1.0 - self.momentum)
        else:
            g = buffer
        return g.to(self.wire_dtype)

    def orthogonal(self, matrix: Tensor) -> Tensor:
        """The update of a whole matrix, of its shape, in `wire_dtype`."""
        return orthogonalise(matrix, method=self.ns_method, steps=self.ns_steps)

    def apply(self, weights: WeightShard, change: Tensor, shape: tuple[int, ...], now: Update) -> None:
        """Change part of a matrix of `shape` by its part. Shape: change (n,)."""
        tallness = math.sqrt(max(1.0, shape[0] / shape[1]))
        for _, master, direction in masters(weights, change, 1.0):
            decayed_step(master, direction, lr=now.lr * tallness, decay=1.0 - now.lr * now.weight_decay)
