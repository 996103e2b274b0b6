"""Muon's arithmetic on whole matrices, against torch.optim.Muon."""

from __future__ import annotations

import pytest
import torch

from raydz.errors import ConfigError
from raydz.optim import Muon, Update, WeightShard, build_optimizer


def gradient(shape, step: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (5, 5)])
def test_standard_follows_torch(shape, nesterov: bool, dtype) -> None:
    optimizer = build_optimizer("Muon", momentum=0.9, nesterov=nesterov, ns_method="standard")
    assert isinstance(optimizer, Muon)
    start = torch.linspace(-1, 1, 60 if shape != (5, 5) else 25)
    shard = WeightShard.around(torch.empty(start.numel(), dtype=dtype))
    shard.store(start)
    weight = torch.nn.Parameter(start.clone().view(shape))
    reference = torch.optim.Muon([weight], lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
    state = {"momentum_buffer": torch.zeros(start.numel())}
    for step in range(1, 4):
        weight.grad = gradient(shape, step) * 0.5
        reference.step()
        direction = optimizer.direction(gradient(shape, step).view(-1), state, grad_scale=0.5)
        update = optimizer.orthogonal(direction.view(shape)).reshape(-1)
        optimizer.apply(shard, update, shape, Update(step, 0.05, 0.1))
    # An ulp in a momentum may turn a bf16 rounding, 2^-9 of an element, which the iteration grows by up to 3.4^5 in
    # the smallest of singular values alone.
    torch.testing.assert_close(shard.master().view(shape), weight.detach(), rtol=0, atol=0.05 * 2**-7)


def test_a_rate_that_cannot_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match="muon_lr"):
        build_optimizer("Muon", lr=0.0, muon_lr=0.1)
