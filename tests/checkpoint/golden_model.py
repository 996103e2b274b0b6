"""Model and values of `golden/` and `golden_2/`: checkpoints of formats 1 and 2 that every later release must read.

`python -m tests.checkpoint.golden_model FOLDER` wrote each, on two ranks of stage 2 in bf16. They are never written
again: a new format gets a golden checkpoint of its own beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_2 = Path(__file__).parent / "golden_2"
STEP = 3
SHAPES = {"body.weight": (7, 6), "body.bias": (7,), "head.weight": (5, 7), "norm": (1,)}
KINDS = ("weight", "exp_avg", "exp_avg_sq")
CLIENT_STATE = {"epoch": 2, "best": 0.125, "name": "golden Größe"}


def golden_values(kind: str, name: str) -> np.ndarray:
    """What a tensor holds: fp32 values with all mantissa bits in use, from its position alone."""
    numel = int(np.prod(SHAPES[name]))
    start = 1000 * KINDS.index(kind) + 100 * list(SHAPES).index(name)
    values = (np.arange(start, start + numel, dtype=np.float64) + 1) / 3 * (-1.0) ** np.arange(numel)
    return (np.abs(values) if kind == "exp_avg_sq" else values).astype(np.float32)


class GoldenModel(nn.Module):
    """Two layers with a tied weight, a scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 7)
        self.head = nn.Linear(7, 5, bias=False)
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.head.weight
        self.norm = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))


def build_golden(stage: int, bf16: bool):
    """An engine over the model, with whatever values it starts from."""
    import raydz.engine

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    return raydz.engine.initialize(GoldenModel(), config, device="cpu")


def set_golden_values(engine) -> None:
    """Put the values straight into the engine's flat buffers, by the layout's table alone."""
    for group, state in zip(engine.optimizer.groups, engine.optimizer.states, strict=True):
        first, last = group.owned
        for kind in KINDS:
            flat = np.zeros(group.layout.padded_numel, np.float32)
            for segment in group.layout.segments:
                flat[segment.start : segment.stop] = golden_values(kind, segment.name)
            values = torch.from_numpy(flat[first:last])
            if kind == "weight":
                group.weights.store(values)
            else:
                state[kind].copy_(values)
    engine.module.seen.copy_(torch.tensor([7, -(2**40)]))
    engine.global_steps, engine.micro_steps, engine.skipped_steps = STEP, 8, 1


def write(rank: int, world_size: int, folder: str) -> None:
    """Runs on every rank."""
    engine = build_golden(stage=2, bf16=True)
    set_golden_values(engine)
    engine.save_checkpoint(folder, client_state=CLIENT_STATE)


if __name__ == "__main__":
    from tests.support.ranks import RankPool

    pool = RankPool(2)
    pool.run(write, sys.argv[1])
    pool.stop()
