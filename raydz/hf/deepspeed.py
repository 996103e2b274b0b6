"""DeepSpeed's ZeRO checkpoints, stages 1 to 3: flat partitions of one file a rank, put together parameter by parameter.

Neighbours: `detect.py` opens one; `deepspeed_state.py` has what both layouts of DeepSpeed share; `safe_load.py` reads
the files. What is where was taken from what DeepSpeed 0.19.8 writes; see "DeepSpeed's layouts" in README.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raydz.errors import CheckpointError
from raydz.hf.deepspeed_state import ModelStates, optimizer_step, read_counters
from raydz.hf.safe_load import load_file
from raydz.hf.source import WEIGHT, Source, SourceTensor

_OPTIM_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def is_zero_folder(folder: Path) -> bool:
    """Whether the folder of a tag holds optimizer partitions."""
    return any(is_zero_file(path.name) for path in folder.iterdir())


def is_zero_file(name: str) -> bool:
    """Whether it holds a rank's optimizer partition."""
    return _OPTIM_FILE.fullmatch(name) is not None


def open_zero(folder: Path) -> Source:
    """Open the folder of one tag. Files are mapped: nothing but what is asked for is read.

    Raises:
        CheckpointError: a rank's file is missing or damaged; it was trained with tensor, pipeline or expert
            parallelism, or sizes do not add up.
    """
    ranks = [load_file(path, str(path)) for path in _rank_files(folder)]
    states = [_part(rank, "optimizer_state_dict", folder) for rank in ranks]
    stage = _stage_of(states[0])
    _check_ranks(states, folder)
    model = ModelStates.open(folder, len(ranks) if stage == 3 else 1)
    pieces = _pieces_of_stage_3 if stage == 3 else _pieces_of_stages_1_and_2
    tensors: list[SourceTensor] = []
    for name, kind, parts in pieces(states, model, folder):
        tensors.append(_join(name, kind, model, parts))
    tensors += model.frozen(stage) + model.buffers()
    counters, notes = read_counters(model, optimizer_step(states[0]), states[0].get("loss_scaler"))
    what = f"a DeepSpeed checkpoint, ZeRO stage {stage or '0 (bf16)'}, {len(ranks)} ranks"
    return Source(
        what, str(folder), tensors, aliases=model.aliases, step=counters["global_steps"], counters=counters,
        client=model.client(notes), notes=notes,
    )  # fmt: skip


def _rank_files(folder: Path) -> list[Path]:
    found = {}
    for path in folder.iterdir():
        match = _OPTIM_FILE.fullmatch(path.name)
        if match and int(match[2]):
            raise _parallel(folder, f"tensor parallelism ({path.name})")
        if match:
            found[int(match[1])] = path
    if any(path.name.startswith("layer_") for path in folder.iterdir()):
        raise _parallel(folder, "pipeline stages or experts (files layer_*)")
    missing = sorted(set(range(max(found) + 1)) - set(found))
    if missing:
        raise CheckpointError(
            "files of ranks are missing", where=str(folder), got=f"none of ranks {missing}",
            wanted=f"ranks 0 to {max(found)}", remedy="copy the folder again, with what every node wrote",
        )  # fmt: skip
    return [found[rank] for rank in sorted(found)]


def _parallel(folder: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "a checkpoint of more than data parallelism", where=str(folder), got=got, wanted="ZeRO stages 1 to 3 alone",
        remedy="let DeepSpeed's ds_to_universal make a universal checkpoint of it, and convert that",
    )  # fmt: skip


def _part(holder: Mapping[str, Any], name: str, folder: Path) -> Any:
    if name not in holder:
        raise CheckpointError(
            "not the layout that DeepSpeed 0.19 writes", where=str(folder), got=f"no {name}", wanted=name,
            remedy="load it with the DeepSpeed that wrote it, and save it with a newer one",
        )  # fmt: skip
    return holder[name]


def _stage_of(state: Mapping[str, Any]) -> int:
    """BF16_Optimizer's files, which stage 1 uses with fp32 accumulation, name no stage."""
    stage = state.get("zero_stage", 1)
    return int(stage.arguments[0]) if hasattr(stage, "arguments") else int(stage)


def _check_ranks(states: list[dict[str, Any]], folder: Path) -> None:
    count = _part(states[0], "partition_count", folder)
    counts = count if isinstance(count, list) else [count]
    if max(counts) != len(states):
        raise CheckpointError(
            "files of ranks are missing", where=str(folder), got=f"{len(states)} ranks", wanted=f"{max(counts)} ranks"
        )
    if min(counts) != max(counts) or states[0].get("ds_zero_partition_groups"):
        raise _parallel(folder, "groups of different sizes: experts")


Parts = list[Callable[[], Tensor]]


def _flats(state: Mapping[str, Any], key: str, group: int, folder: Path) -> dict[str, Tensor]:
    """One rank's flat tensors of a group by kind."""
    base = state["base_optimizer_state" if "base_optimizer_state" in state else "optimizer_state_dict"]
    own = base["state"].get(group, {}) if isinstance(base, dict) else base[group]
    master = _part(state, key, folder)[group]
    flats = {WEIGHT: master.detach()}
    for kind, value in own.items():
        if isinstance(value, Tensor) and value.dim() and kind != "step":
            flats[kind] = value.detach()
    return flats


def _pieces_of_stages_1_and_2(
    states: list[dict[str, Any]], model: ModelStates, folder: Path
) -> Iterator[tuple[str, str, Parts]]:
    """The ranks' partitions, one after the other, are the group's parameters, one after the other.

    Not by `param_slice_mappings`: DeepSpeed 0.19.8 writes wrong ones under `round_robin_gradients`.
    """
    for group, names in enumerate(model.groups):
        flats = [_flats(state, "single_partition_of_fp32_groups", group, folder) for state in states]
        paddings = _paddings(states[0], group, len(names))
        offset = 0
        for name, padding in zip(names, paddings, strict=True):
            numel = model.shapes[name].numel()
            for kind in flats[0]:
                yield name, kind, _between([flat[kind] for flat in flats], offset, offset + numel)
            offset += numel + padding


def _paddings(state: Mapping[str, Any], group: int, count: int) -> list[int]:
    """Elements behind each parameter of a group."""
    found = state.get("param_alignment_paddings")
    return [0] * count if found is None else list(found[group])


def _between(flats: list[Tensor], start: int, stop: int) -> Parts:
    """Elements [start, stop) of flat tensors that stand one after the other. Only the last ones lack their padding."""
    parts: Parts = []
    first = 0
    for flat in flats:
        low, high = max(start, first), min(stop, first + flat.numel())
        if low < high:
            parts.append(partial(_slice, flat, low - first, high - low))
        first += flat.numel()
    return parts


def _pieces_of_stage_3(
    states: list[dict[str, Any]], model: ModelStates, folder: Path
) -> Iterator[tuple[str, str, Parts]]:
    """Each rank has an equal part of every parameter, the last one padded, one behind the other in each sub-group."""
    for group, names in enumerate(model.groups):
        flats = [_flats(state, "fp32_flat_groups", group, folder) for state in states]
        offset = 0
        for name in names:
            numel = model.shapes[name].numel()
            share = -(-numel // len(states))
            own = [max(0, min(share, numel - rank * share)) for rank in range(len(states))]
            for kind in flats[0]:
                yield (
                    name,
                    kind,
                    [
                        partial(_slice, flat[kind], offset, count)
                        for flat, count in zip(flats, own, strict=True)
                        if count
                    ],
                )
            offset += share


def _slice(flat: Tensor, start: int, numel: int) -> Tensor:
    return flat[start : start + numel]


def _join(name: str, kind: str, model: ModelStates, parts: Parts) -> SourceTensor:
    shape, where = model.shapes[name], f"{model.folder}: {name} ({kind})"
    found = [part() for part in parts]  # views of mapped files
    numel = sum(part.numel() for part in found)
    if numel != shape.numel() or (not found and numel):
        raise CheckpointError(
            "the ranks' parts of a parameter do not add up", where=where, got=f"{numel} elements",
            wanted=f"{shape.numel()} of shape {tuple(shape)}", remedy="a rank's file belongs to another save",
        )  # fmt: skip
    dtype = found[0].dtype if found else torch.float32

    def read() -> Tensor:
        whole = torch.cat(found).view(shape)
        return model.check_master(name, whole) if kind == WEIGHT else whole

    return SourceTensor(name, kind, dtype, tuple(shape), read)
