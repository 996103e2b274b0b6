"""DeepSpeed's universal checkpoints: a folder a parameter, a file for the weight and each moment.

Neighbours: `detect.py` opens one; `deepspeed_state.py` has what stands beside the parameters.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raydz.errors import CheckpointError
from raydz.hf.deepspeed_state import ModelStates, optimizer_step, read_counters
from raydz.hf.safe_load import Inert, load_file
from raydz.hf.source import WEIGHT, Source, SourceTensor

_NOT_STATES = {"fp32", "step"}


def is_universal_folder(folder: Path) -> bool:
    """Whether `ds_to_universal` wrote this folder."""
    return any((folder / "zero").glob("*/fp32.pt"))


def is_universal_file(key: str) -> bool:
    """Whether this key, below its folder, is that of a parameter's weight."""
    return key.startswith("zero/") and key.count("/") == 2 and key.endswith("/fp32.pt")


def open_universal(folder: Path) -> Source:
    """Open what `ds_to_universal` wrote from any stage; a parameter's file is read when it is asked for.

    Raises:
        CheckpointError: a parameter's file is missing or damaged, or of another size than the model states say.
    """
    num_files = len(list(folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt")))
    model = ModelStates.open(folder, num_files)
    stage = 3 if num_files else 2
    tensors: list[SourceTensor] = []
    for name, shape in model.shapes.items():
        own = folder / "zero" / name
        states = sorted(path.stem for path in own.glob("*.pt") if path.stem not in _NOT_STATES)
        for kind in ("fp32", *states):
            read = partial(_read, own / f"{kind}.pt", shape, model, name)
            tensors.append(SourceTensor(name, WEIGHT if kind == "fp32" else kind, torch.float32, tuple(shape), read))
            if not (own / f"{kind}.pt").exists():
                raise CheckpointError("a parameter's file is missing", where=str(own / f"{kind}.pt"))
    tensors += model.frozen(stage) + model.buffers()
    step, scaler = _common_state(folder)
    counters, notes = read_counters(model, step, scaler)
    return Source(
        "a universal checkpoint of DeepSpeed's", str(folder), tensors, aliases=model.aliases,
        step=counters["global_steps"], counters=counters, client=model.client(notes), notes=notes,
    )  # fmt: skip


def _read(path: Path, shape: torch.Size, model: ModelStates, name: str) -> Tensor:
    """Stages up to 2 give a dict with the tensor in its shape, stage 3 the tensor alone and flat."""
    stored = load_file(path, str(path))
    tensor = stored.get("param") if isinstance(stored, dict) else stored
    if not isinstance(tensor, Tensor) or tensor.numel() != shape.numel():
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise CheckpointError("a parameter's file has another size", where=str(path), got=got, wanted=tuple(shape))
    found = tensor.detach().float().view(shape)
    return model.check_master(name, found) if path.stem == "fp32" else found


def _common_state(folder: Path) -> tuple[int | None, Inert | None]:
    """The optimizer's step and the loss scaler."""
    path = folder / "zero" / "optimizer_state.pt"
    state: dict[str, Any] = load_file(path, str(path))
    step = optimizer_step(state)
    if step is None:
        steps = [int(load_file(file, str(file))) for file in sorted((folder / "zero").glob("*/step.pt"))[:1]]
        step = steps[0] if steps else None
    return step, state.get("loss_scaler")
