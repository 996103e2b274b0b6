"""Optimizers in plain torch, from their papers: what raydz's are compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad) + group["weight_decay"] * p
                self.state[p]["m"] = beta2 * m + (1 - beta2) * p.grad
                p.sub_(group["lr"] * update)


class ExactMuon(torch.optim.Optimizer):
    """Muon whose Newton-Schulz polynomials act on the singular values that an fp64 SVD gives."""

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float = 0.0, nesterov: bool = True
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            mu = group["momentum"]
            for p in group["params"]:
                m = self.state[p].get("m", torch.zeros_like(p))
                self.state[p]["m"] = m = mu * m + (1 - mu) * p.grad
                direction = mu * m + (1 - mu) * p.grad if group["nesterov"] else m
                update = exact_orthogonal(direction) * math.sqrt(max(1, p.shape[0] / p.shape[1]))
                p.copy_((1 - group["lr"] * group["weight_decay"]) * p - group["lr"] * update)


def exact_orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """U f(S) V' with f(s) = 3.4445 s - 4.7750 s^3 + 2.0315 s^5 iterated, in fp64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


class Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups in which matrices decay and vectors do not."""
    everything = list(parameters)
    return [
        {"params": [p for p in everything if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in everything if p.dim() <= 1], "weight_decay": 0.0},
    ]
