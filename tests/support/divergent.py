"""Ranks that do not do the same: run under torchrun by tests/fault/test_divergence.py with the name of a function."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import raydz

CONFIG = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "parallel": {"divergence_timeout_s": 3.0, "collective_timeout_s": 120.0},
}


class Blocks(nn.Module):
    """Three blocks, of which a call may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, x, left_out: int | None = None):
        for index, block in enumerate(self.blocks):
            if index != left_out:
                x = block(x).relu()
        return x


def take_step(engine, left_out: int | None = None) -> None:
    engine.backward(engine(torch.ones(2, 10), left_out=left_out).square().mean())
    engine.step()


def branch(engine) -> None:
    """One rank leaves a block out."""
    take_step(engine)
    take_step(engine, left_out=1 if engine.world.rank == 1 else None)


def uneven(engine) -> None:
    """One rank has a batch less than the other and is done."""
    for _ in range(3 if engine.world.rank == 0 else 2):
        take_step(engine)


def exception(engine) -> None:
    """One rank fails in its own code."""
    take_step(engine)
    if engine.world.rank == 1:
        raise ZeroDivisionError("a bug on rank 1")
    take_step(engine)


def other_collective(engine) -> None:
    """One rank evaluates while the other trains on."""
    take_step(engine)
    if engine.world.rank == 1:
        engine.full_state_dict()
    take_step(engine)


def slow(engine) -> None:
    """One rank takes longer than the monitor's limit, and comes."""
    take_step(engine)
    if engine.world.rank == 1:
        time.sleep(8)
    take_step(engine)
    print("came through", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]](raydz.initialize(Blocks(), CONFIG, device="cpu"))
