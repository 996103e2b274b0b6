"""One training of a small model by raydz's engine on N ranks, and by plain torch in one process: the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zero.models import VOCABULARY

ROWS, LENGTH = 12, 5  # 12 rows divide over 1, 2, 3 and 4 ranks
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-4, 0.1
# Three AdamW steps at lr 1e-2 on weights of magnitude 1. With eps 1e-4 a gradient's rounding error of 1e-8 moves a
# step by at most 1e-4 of lr, which is 1e-6.
TOLERANCE = 4e-6

Batch = dict[str, Tensor]


def token_loss(model: Callable, batch: Batch, rank: int, step: int) -> Tensor:
    """Sum of token losses over labels that count."""
    out = model(batch["ids"])
    logits = out["logits"] if isinstance(out, dict) else out
    return sum_loss(logits, batch)


def sum_loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


@dataclass(frozen=True)
class Run:
    """A model, its loss on one micro-batch (model, batch, rank, step), and how the engine is to train it."""

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Batch, int, int], Tensor] = token_loss
    stage: int = 0
    accumulation: int = 1
    steps: int = 3
    bf16: bool = False
    fp16: bool = False
    clip: float = 0.5
    units: tuple[str, ...] | None = None
    zero: tuple[tuple[str, int], ...] = ()
    boundary: bool = False
    max_skipped: int = 20
    is_meta: bool = False

    def with_(self, **changes: Any) -> Run:
        return replace(self, **changes)

    def config(self) -> dict[str, Any]:
        params = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
        return {
            "train_batch_size": ROWS,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": params},
            "bf16": {"enabled": self.bf16},
            "fp16": {"enabled": self.fp16, "initial_scale_power": 10},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 5, **dict(self.zero)},
            "parallel": {
                "units": list(self.units) if self.units else None,
                "gradient_reduction": "boundary" if self.boundary else "micro_batch",
            },
        }


@dataclass
class Outcome:
    weights: dict[str, np.ndarray]
    losses: list[float]
    norms: list[float]


def batch_for(step: int) -> Batch:
    """Rows whose numbers of counted labels differ; the same for everyone."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, LENGTH - row % LENGTH :] = -100
    return {"ids": ids[:, :-1], "labels": labels}


def num_labels(batch: Batch) -> float:
    return float((batch["labels"] != -100).sum())


def part(batch: Batch, index: int, count: int) -> Batch:
    return {key: value.chunk(count)[index] for key, value in batch.items()}


def build(run: Run) -> nn.Module:
    """The model with the same values everywhere."""
    torch.manual_seed(0)
    with torch.device("meta" if run.is_meta else "cpu"):
        return run.model()


def start(run: Run, model: nn.Module | None = None, **sections: Any):
    """An engine for `run` on this rank; `sections` replace those of its configuration."""
    import raydz.engine

    return raydz.engine.initialize(
        build(run) if model is None else model,
        run.config() | sections,
        device="cpu",
        max_skipped_in_row=run.max_skipped,
    )


def train_step(engine, run: Run, rank: int, world_size: int, step: int):
    """One optimizer step; returns (this rank's loss sum, report)."""
    batch, local, report = batch_for(step), 0.0, None
    for i in range(run.accumulation):
        micro = part(part(batch, rank, world_size), i, run.accumulation)
        loss = run.loss(engine, micro, rank, step)
        engine.backward(loss, denominator=num_labels(batch))
        local += loss.item()
        report = engine.step()
    return local, report


def numpy_weights(engine) -> dict[str, np.ndarray]:
    """Whole parameters and buffers; numpy has no bf16, so those are widened."""
    state = engine.full_state_dict()
    return {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy().copy() for n, t in state.items()}


def train_with_engine(rank: int, world_size: int, run: Run) -> Outcome:
    """Runs on every rank; rank 0's outcome has the weights."""
    engine, losses, norms = start(run), [], []
    for step in range(1, run.steps + 1):
        local, report = train_step(engine, run, rank, world_size, step)
        losses.append(
            sum(row[0] for row in engine.comms.reduce.all_gather_values([local])) / num_labels(batch_for(step))
        )
        norms.append(report.grad_norm)
    outcome = Outcome(numpy_weights(engine), losses, norms)
    engine.destroy()
    return outcome


def torch_optimizer(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)


def train_with_torch(run: Run, world_size: int) -> Outcome:
    """Plain torch in one process: the loss of all ranks in one graph; a parameter without a gradient has zeros."""
    model = build(run)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses, norms = torch_optimizer(model), [], []
    for step in range(1, run.steps + 1):
        batch = batch_for(step)
        sums = [run.loss(model, part(batch, rank, world_size), rank, step) for rank in range(world_size)]
        loss = sum(sums[1:], sums[0]) / num_labels(batch)
        loss.backward()
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, run.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome({n: p.detach().numpy().copy() for n, p in model.named_parameters()}, losses, norms)


def assert_close(found: Outcome, wanted: Outcome) -> None:
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=2e-6)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=5e-6)
    assert_close_weights(found.weights, wanted.weights)


def assert_close_weights(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, weights in wanted.items():
        assert found[name].shape == weights.shape
        np.testing.assert_allclose(found[name], weights, rtol=0, atol=TOLERANCE, err_msg=name)


def assert_equal_bits(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, weights in wanted.items():
        assert found[name].tobytes() == weights.tobytes(), name


def owned_bytes(engine) -> list[bytes]:
    """Every bit of this rank's masters and optimizer states."""
    weights = [part for group in engine.sharded.groups for part in (group.weights.compute, group.weights.low)]
    states = [tensor for state in engine.optimizer.states for tensor in state.values()]
    return [t.clone().view(torch.uint8).numpy().tobytes() for t in [*weights, *states] if t is not None]
