"""Many slices in one call. Oracle: the same steps one after the other."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from raydz.ops import adamw_step
from raydz.ops.batch import Batch
from raydz.ops.elementwise import lion_update, sgd_update
from raydz.ops.operands import Operands

pytestmark = pytest.mark.native
SIZES = [0, 1, 4095, 4096, 4097, 0, 0, 200_001, 7, 65, 70_000, 3, 0]


def slices(seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [list(torch.randn(4, numel, generator=generator).abs()) for numel in SIZES]


def steps(parts: list[list[torch.Tensor]], batch: Batch | None) -> int:
    """AdamW, Lion and SGD in turn, each slice with settings of its own."""
    count = 0
    for number, (p, g, m, v) in enumerate(parts):
        lr, decay = 1e-3 * (1 + number), 0.1 * (number % 2)
        if number % 3 == 0:
            settings = {"lr": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": decay, "step": 1 + number}
            count += adamw_step(p, g, m, v, **settings, batch=batch)
        elif number % 3 == 1:
            o = Operands(p, g, (m,))
            count += lion_update(o, lr=lr, beta1=0.9, beta2=0.99, weight_decay=decay, batch=batch)
        else:
            settings = {"momentum": 0.9, "dampening": 0.1, "nesterov": False, "is_first": False}
            count += sgd_update(Operands(p, g, (m,)), lr=lr, weight_decay=decay, **settings, batch=batch)
    return count


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_batch_makes_the_steps_of_its_slices(isa, threads):
    one_by_one, together = slices(), slices()
    for parts in (one_by_one, together):
        for number in (1, 7, 10):
            parts[number][1][0] = math.inf
    batch = Batch()
    assert steps(together, batch) == 0 and len(batch) == len(SIZES)
    assert all(torch.equal(a, b) for left, right in zip(together, slices(), strict=True) for a, b in
               zip(left[2:], right[2:], strict=True)), "a step was made before `run`"  # fmt: skip
    assert batch.run(threads) == steps(one_by_one, None) == 3
    for left, right in zip(together, one_by_one, strict=True):
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True))
    assert len(batch) == 0 and batch.run(threads) == 0


def test_a_batch_keeps_its_buffers_alive(isa):
    batch, result = Batch(), torch.zeros(50_000, dtype=torch.bfloat16)

    def note():
        p, g, m, v = torch.ones(4, 50_000)
        adamw_step(
            p, g, m, v, out=result, lr=0.5, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, step=1, batch=batch,
            bias_correction=False,
        )  # fmt: skip

    note()
    gc.collect()
    filler = [torch.full((50_000,), 9.0) for _ in range(8)]
    batch.run()
    assert result.eq(0.5).all() and filler


def test_without_kernels_a_batch_has_nothing_left_to_do(without_kernels):
    noted, plain, batch = slices(), slices(), Batch()
    steps(noted, batch)
    assert len(batch) == 0
    steps(plain, None)
    assert all(torch.equal(a, b) for x, y in zip(noted, plain, strict=True) for a, b in zip(x, y, strict=True))
