"""Conversions in tests: recorded and freshly made checkpoints, engines that go on from them, tensors by kind/name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from raydz.hf import Source, open_source, write_checkpoint
from raydz.storage import open_store
from tests.hf import foreign_model as foreign

RECORDED = Path(__file__).parent / "recorded"
SAME_TRAINING = {"universal": "stage1", "universal-of-stage3": "stage3", "stage2": "stage1"}
"""Case -> the one that recorded what it must hold: conversions of DeepSpeed's own; and `stage2`, which trains as stage
1 does, to the bit, but where DeepSpeed's functions that look into a live engine go wrong (round_robin_gradients)."""


def expected(case: str) -> tuple[dict[str, Tensor], list[float]]:
    """What the live engine held when a recorded checkpoint was saved, by kind/name, and the losses of all steps."""
    with safe_open(str(RECORDED / SAME_TRAINING.get(case, case) / "expected.safetensors"), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["losses"])


def tensors_of(source: Source) -> dict[str, Tensor]:
    """By kind/name."""
    return {f"{item.kind}/{item.name}": item.read() for item in source.tensors}


def same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names that are missing or differ in a bit."""
    return [name for name, tensor in wanted.items() if name not in found or not torch.equal(found[name], tensor)]


def convert(src: str | Path, dst: str | Path, **options: Any) -> Source:
    """From `src` into a folder of raydz checkpoints; the source as it was opened."""
    source = open_source(str(src), **options)
    write_checkpoint(source, open_store(str(dst)))
    return source


def go_on(rank: int, world_size: int, folder: str, stage: int, bf16: bool, load: dict[str, Any]) -> dict[str, Any]:
    """Load a converted checkpoint into a fresh engine, save it again, and train the next steps; what came of it."""
    import raydz.engine

    rows = foreign.ROWS_A_RANK * foreign.RANKS // world_size
    config = {
        "train_batch_size": foreign.ROWS_A_RANK * foreign.RANKS,
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "AdamW", "params": foreign.ADAM},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 4},
        "bf16": {"enabled": bf16},
    }
    model = foreign.Foreign()  # other values than those that were trained
    engine = raydz.engine.initialize(model, config, device="cpu")
    try:
        _, client = engine.load_checkpoint(folder, **load)
        steps = engine.global_steps
        if not load:
            engine.save_checkpoint(f"{folder}-again-{stage}-{world_size}")
        losses = []
        for number in range(foreign.STEPS, foreign.STEPS + foreign.NEXT_STEPS):
            ids, labels = foreign.batch(number, rank * rows, rows)
            loss = foreign.loss_of(engine(ids), labels)
            engine.backward(loss)
            engine.step()
            everyone = engine.comms.world.all_gather_values([float(loss.detach())])
            losses.append(sum(row[0] for row in everyone) / world_size)
        return {"client": client, "steps": steps, "losses": losses}
    finally:
        engine.destroy()


def merged(folder: str) -> dict[str, Tensor]:
    """All tensors of a raydz checkpoint by kind/name, joined from what the safetensors library reads of its files."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for path in sorted(Path(folder).rglob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name, _, interval = key.rpartition("[")
                pieces.setdefault(name, []).append((int(interval.split(":")[0]), file.get_tensor(key)))
    return {name: torch.cat([part for _, part in sorted(found, key=lambda p: p[0])]) for name, found in pieces.items()}
