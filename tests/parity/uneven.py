"""Batches that ranks have unequally many of, and their training in one process of torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tests.zero.models import VOCABULARY
from tests.zero.training import Run, build, torch_optimizer

ROWS, LENGTH = 2, 5


@dataclass(frozen=True)
class Uneven:
    """How many batches each rank has."""

    run: Run
    batches: tuple[int, ...]
    with_denominator: bool = False

    @property
    def num_steps(self) -> int:
        return -(-max(self.batches) // self.run.accumulation)


def batch(rank: int, index: int) -> torch.Tensor:
    """Ids (ROWS, LENGTH + 1)."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)


def loss_of(model, ids: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction=reduction)


def in_step(case: Uneven, step: int) -> list[tuple[int, int]]:
    """(rank, index) of the batches that take part in a step, from 0."""
    first = step * case.run.accumulation
    return [
        (rank, index)
        for rank, count in enumerate(case.batches)
        for index in range(first, min(first + case.run.accumulation, count))
    ]


def oracle(case: Uneven) -> tuple[dict[str, np.ndarray], float]:
    """Plain torch in one process; a parameter without a gradient has zeros."""
    model = build(case.run)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, norm = torch_optimizer(model), 0.0
    for step in range(case.num_steps):
        losses = [loss_of(model, batch(*which), "mean") for which in in_step(case, step)]
        torch.stack(losses).mean().backward()
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = float(torch.nn.utils.clip_grad_norm_(trained, case.run.clip))
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().numpy().copy() for n, p in model.named_parameters()}, norm
