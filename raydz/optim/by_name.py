"""Elementwise optimizers of torch.optim by name, over flat fp32 shards.

Neighbours: `build.py` makes them. See "torch.optim by name" in README.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raydz.optim.elementwise import masters
from raydz.optim.optimizer import Update
from raydz.optim.weights import WeightShard

ELEMENTWISE: dict[str, tuple[str, ...]] = {
    "Adadelta": ("square_avg", "acc_delta"),
    "Adagrad": ("sum",),
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg",),
}
"""Names and the states of each that are as long as the parameter and begin at zero."""


@dataclass(frozen=True)
class TorchOptimizer:
    """One of `ELEMENTWISE`, run by torch's own single-tensor code.

    Args:
        options: the class's arguments besides lr and weight_decay.
    """

    name: str
    lr: float
    weight_decay: float
    options: Mapping[str, Any]
    takes_noise = False

    @property
    def state_names(self) -> tuple[str, ...]:
        names = ELEMENTWISE[self.name]
        if self.options.get("momentum"):
            names += ("momentum_buffer",)
        return (*names, "grad_avg") if self.options.get("centered") else names

    def update(self, weights: WeightShard, grad: Tensor, state: dict[str, Tensor], now: Update) -> None:
        parameter = nn.Parameter(torch.empty(0, device=grad.device))
        kind = getattr(torch.optim, self.name)
        optimizer = kind([parameter], lr=now.lr, weight_decay=now.weight_decay, foreach=False, **self.options)
        for part, master, g in masters(weights, grad, now.grad_scale):
            parameter.data, parameter.grad = master, g
            views = {name: state[name][part] for name in self.state_names}
            optimizer.state[parameter] = {"step": torch.tensor(float(now.step - 1)), **views, **self._scalars(now.step)}
            optimizer.step()

    def _scalars(self, step: int) -> dict[str, Tensor]:
        """States that are a function of the step number, as they are before it."""
        if self.name != "NAdam":
            return {}
        return {"mu_product": torch.tensor(_mu_product(step, self.options["betas"][0], self.options["momentum_decay"]))}


@functools.lru_cache(maxsize=8)
def _mu_product(step: int, beta1: float, momentum_decay: float) -> float:
    """NAdam's product of momenta of the steps before `step`."""
    product = 1.0
    for earlier in range(1, step):
        product *= beta1 * (1.0 - 0.5 * 0.96 ** (earlier * momentum_decay))
        if product < torch.finfo(torch.float32).tiny:
            return 0.0
    return product
