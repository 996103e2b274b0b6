"""Engines over small odd models, run on ranks, and what their files hold as the safetensors library reads them."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CHUNK = 256
"""Bytes of a checksum's chunk in these tests: files of a few KiB then have many."""


@dataclass(frozen=True)
class Setup:
    """An engine. `shapes` are the model's trainable parameters; the model has a frozen one and buffers besides."""

    stage: int = 0
    shapes: tuple[tuple[int, ...], ...] = ((7, 6), (7,), (10, 7), (1,), (), (0, 3))
    shard_size: int | None = None
    bf16: bool = False
    tied: bool = False
    bucket: int | None = None
    accumulation: int = 1
    lr: float = 1e-2


class Odd(nn.Module):
    """Parameters of any shapes under a loss in which every element counts differently."""

    def __init__(self, shapes, tied: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Module()
        for i, shape in enumerate(shapes):
            owner = self.first if i % 2 else self
            owner.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=generator)))
        if tied:
            self.first.twin = self.p0
        self.frozen = nn.Parameter(torch.randn(5, generator=generator), requires_grad=False)
        self.register_buffer("seen", torch.tensor(11))
        self.register_buffer("table", torch.randn(3, 4, generator=generator).t())
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        total = (self.frozen * x.mean()).sum()
        for parameter in self.parameters():
            if parameter.requires_grad:
                steps = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
                total = total + ((parameter - 0.01 * steps) * x.mean()).square().sum()
        return total


def build(setup: Setup, model: nn.Module | None = None):
    """The engine of a setup, on this rank; other model values than those of `Odd` come from a load."""
    import raydz.engine
    from raydz.config import load_engine

    zero = {"stage": setup.stage, "stage3_param_persistence_threshold": 8}
    if setup.bucket:
        zero |= {"reduce_bucket_size": setup.bucket}
    config = load_engine(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": setup.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": setup.lr, "weight_decay": 0.1}},
            "bf16": {"enabled": setup.bf16},
            "zero_optimization": zero,
            "parallel": {"shard_size": setup.shard_size},
        }
    )
    return raydz.engine.initialize(model or Odd(setup.shapes, setup.tied), config, device="cpu")


def train(engine, first: int, last: int) -> None:
    """Steps first..last, the same for every rank and world size up to rounding."""
    for step in range(first, last + 1):
        for _ in range(engine.batch.accumulation):
            engine.backward(engine(torch.full((2,), 1.0 + 0.1 * step)))
            engine.step()


@contextmanager
def small_chunks():
    """Files written within have checksums for every `CHUNK` bytes."""
    from raydz.checkpoint import data_file

    usual = data_file.CHUNK_BYTES
    data_file.CHUNK_BYTES = CHUNK
    try:
        yield
    finally:
        data_file.CHUNK_BYTES = usual


def train_and_save(rank: int, world_size: int, setup: Setup, uri: str, steps: int, options=None) -> dict[str, Any]:
    """Train from scratch, save, and tell what rank 0 sees of the whole state."""
    engine = build(setup)
    train(engine, 1, steps)
    engine.module.seen.fill_(1000 + steps)
    with small_chunks():
        engine.save_checkpoint(uri, client_state={"epoch": 3}, options=options)
    found = {"weights": numpy_state(engine), "steps": engine.global_steps}
    engine.destroy()
    return found


def load_and_save(rank: int, world_size: int, setup: Setup, uri: str, again: str, options=None) -> dict[str, Any]:
    """Load into a fresh engine, count the bytes, save elsewhere."""
    from raydz.checkpoint import open_checkpoint, state_pieces
    from raydz.storage import open_store

    engine = build(setup)
    train(engine, 1, 1)  # whatever a load does not overwrite shows
    with torch.no_grad():
        engine(torch.ones(2))  # gathers, so that a load has copies to make stale
    store = open_store(uri, options)
    folder, manifest = open_checkpoint(store)
    num_bytes = engine.load_from(store, folder, manifest).bytes_read
    pieces = state_pieces(engine.sharded, engine.optimizer, saving=False)
    held = {
        alike: [(p.kind, p.names, p.start, p.stop) for p in pieces if (p.holders == "world") is alike]
        for alike in (True, False)
    }
    engine.save_checkpoint(again)
    with engine.gathered():
        shown = {name: p.detach().clone().float().numpy() for name, p in engine.module.named_parameters()}
    found = {"weights": numpy_state(engine), "steps": engine.global_steps}
    found |= {"bytes": num_bytes, "held": held, "shown": shown}
    engine.destroy()
    return found


def numpy_state(engine) -> dict[str, np.ndarray]:
    """Whole weights (bf16 ones, which only frozen parameters have, as fp32) and buffers by name, on rank 0."""
    state = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in engine.full_state_dict().items()}
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


# -- what files hold, by the safetensors library ----------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One piece in a data file: elements [start, stop) of (kind, name), at bytes [low, high) of the file."""

    file: Path
    kind: str
    name: str
    start: int
    stop: int
    low: int
    high: int


def data_files(folder: Path) -> list[Path]:
    """The data files of all attempts below a checkpoint's or a run's folder."""
    return sorted(folder.rglob("*.safetensors"))


def stored_pieces(folder: Path) -> list[Stored]:
    """Every piece of every data file, from the safetensors headers alone."""
    found = []
    for file in data_files(folder):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            kind, name, start, stop = re.fullmatch(r"([^/]+)/(.+)\[(\d+):(\d+)\]", key).groups()
            low, high = (8 + size + offset for offset in entry["data_offsets"])
            found.append(Stored(file, kind, name, int(start), int(stop), low, high))
    return found


def stored_tensors(folder: Path) -> dict[tuple[str, str], np.ndarray]:
    """Flat tensors by (kind, name), put together from the safetensors library's view; each element is there once."""
    from safetensors import safe_open

    parts: dict[tuple[str, str], list[tuple[int, np.ndarray]]] = {}
    for file in data_files(folder):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                kind, name, start, stop = re.fullmatch(r"([^/]+)/(.+)\[(\d+):(\d+)\]", key).groups()
                tensor = opened.get_tensor(key)
                values = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
                assert values.shape == (int(stop) - int(start),)
                parts.setdefault((kind, name), []).append((int(start), values))
    whole = {}
    for key, found in parts.items():
        end = 0
        for start, values in sorted(found, key=lambda part: part[0]):
            assert start == end, f"{key}: element {start} after {end}"
            end += len(values)
        whole[key] = np.concatenate([values for _, values in sorted(found, key=lambda part: part[0])])
    return whole


def assert_same_bits(found: dict, wanted: dict) -> None:
    """Same keys, dtypes and bits."""
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert found[key].dtype == values.dtype, key
        assert found[key].tobytes() == values.tobytes(), f"{key}: {found[key]} is not {values}"


def only_checkpoint(root: Path) -> Path:
    """The one committed checkpoint's folder below `root`."""
    (manifest,) = root.rglob("manifest.json")
    return manifest.parent
