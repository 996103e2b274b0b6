"""One training with the optimizer on the device and again with it in host memory, and every bit of what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.zero.models import Plain
from tests.zero.training import Run, build, train_step

RUN = Run(Plain, steps=3, clip=0.42)
"""Its norms are 0.470, 0.408, 0.438 and 0.413: clipping fires in every other step."""


def hosted(config: dict[str, Any], mode: str = "auto", **section: Any) -> dict[str, Any]:
    """The same configuration with the optimizer offloaded."""
    zero = {**config["zero_optimization"], "offload_optimizer": {"device": "cpu", **section}}
    parallel = {**config["parallel"], "offload_update": mode, "offload_threads": 2}
    return {**config, "zero_optimization": zero, "parallel": parallel}


def engine_of(run: Run, config: dict[str, Any], **options: Any):
    import raydz.engine

    return raydz.engine.initialize(build(run), config, device="cpu", max_skipped_in_row=run.max_skipped, **options)


@dataclass
class Trained:
    """What a rank has after a training: masters, states and compute weights by name, norms, reports."""

    bits: dict[str, bytes]
    norms: list[float]
    reports: list[Any] = field(default_factory=list)


def bits_of(engine) -> dict[str, bytes]:
    """Of what this rank owns."""
    found: dict[str, torch.Tensor] = {}
    for index, (group, states) in enumerate(zip(engine.optimizer.groups, engine.optimizer.states, strict=True)):
        weights = group.weights
        parts = {"compute": weights.compute, "master": weights.master(), **states}
        found |= {f"{index} {group.label} {name}": tensor for name, tensor in parts.items()}
    return {name: tensor.detach().clone().view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def train(rank: int, world_size: int, run: Run, config: dict[str, Any]) -> Trained:
    engine = engine_of(run, config)
    reports = [train_step(engine, run, rank, world_size, step)[1] for step in range(1, run.steps + 1)]
    trained = Trained(bits_of(engine), [report.grad_norm for report in reports], reports)
    engine.destroy()
    return trained


def assert_same(found: Trained, wanted: Trained, what: str) -> None:
    assert found.norms == wanted.norms, what
    assert found.bits.keys() == wanted.bits.keys(), what
    different = [name for name, values in wanted.bits.items() if found.bits[name] != values]
    assert not different, f"{what}: {different}"
