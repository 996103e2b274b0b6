"""torch's distributed checkpoints (DCP), as FSDP2 programs and torchtitan save them.

Neighbours: `detect.py` opens one; `dcp_metadata.py` says where things are; `safe_load.py` reads each chunk.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raydz.errors import CheckpointError
from raydz.hf.dcp_metadata import Chunk, Item, read_metadata
from raydz.hf.safe_load import load_file
from raydz.hf.source import BUFFER, WEIGHT, Source, SourceTensor

METADATA = ".metadata"


def open_dcp(folder: Path, *, model_key: str | None = None, weights_only: bool = False) -> Source:
    """Open a checkpoint whose optimizer states, where there are some, go by parameters' names.

    Args:
        model_key: keys that lead to the model's state, joined by dots; None: found by the optimizer's names.
        weights_only: leave optimizer states out, also such as go by number.

    Raises:
        CheckpointError: the metadata are not DCP's; a file is missing; no telling what is the model.
    """
    items = read_metadata((folder / METADATA).read_bytes(), str(folder / METADATA))
    states = {item.path: state for item in items if (state := _optimizer_state(item.path)) is not None}
    plain = [item for item in items if item.path not in states and "param_groups" not in map(_first_word, item.path)]
    trained = {name for name, _ in states.values() if not str(name).isdigit()}
    if not weights_only and len(trained) < len({name for name, _ in states.values()}):
        raise CheckpointError(
            "the optimizer's states go by number, not by the parameter's name", where=str(folder),
            got="optimizer.state_dict()", wanted="torch.distributed.checkpoint.state_dict.get_state_dict",
            remedy="save it again that way, or convert --weights-only",
        )  # fmt: skip
    key = _model_key([item for item in plain if item.dtype], trained, model_key, str(folder))
    source = Source("a DCP checkpoint of torch's", str(folder), [])
    for item in plain:
        if item.dtype and item.path[:-1] == key:
            source.tensors += _model_tensors(folder, item, trained)
    if not weights_only:
        source.tensors += [
            _tensor(folder, item, *states[item.path])
            for item in items
            if item.dtype and item.path in states and states[item.path][1] != "step"
        ]
    _read_rest(folder, source, [i for i in plain if not (i.dtype and i.path[:-1] == key)])
    _read_step(folder, source, [i for i in items if i.path in states and states[i.path][1] == "step"])
    _find_ties(source, trained)
    return source


def _first_word(key: Any) -> str:
    return str(key).split(".")[0]


def _optimizer_state(path: tuple[Any, ...]) -> tuple[Any, str] | None:
    """Parameter and kind, where a path is that of an optimizer state: nested, or flattened into one key."""
    if len(path) >= 3 and path[-3] == "state":
        return path[-2], str(path[-1])
    last = str(path[-1])
    if last.startswith("state.") and last.count(".") >= 2:
        name, _, kind = last.removeprefix("state.").rpartition(".")
        return name, kind
    return None


def _model_key(items: Sequence[Item], trained: set[Any], wanted: str | None, where: str) -> tuple[Any, ...]:
    groups = Counter(item.path[:-1] for item in items)
    if wanted is not None:
        found = [key for key in groups if ".".join(map(str, key)) == wanted]
    elif trained:
        hits = Counter(item.path[:-1] for item in items if item.path[-1] in trained)
        found = [key for key, _ in hits.most_common(1)]
    else:
        found = list(groups)
    if len(found) != 1:
        names = ", ".join(repr(".".join(map(str, key))) for key in groups)
        raise CheckpointError(
            "no telling which tensors are the model's", where=where, got=f"tensors under {names or 'no key'}",
            wanted="one key" if wanted is None else repr(wanted), remedy="name it with --model-key",
        )  # fmt: skip
    return found[0]


def _model_tensors(folder: Path, item: Item, trained: set[Any]) -> list[SourceTensor]:
    """DCP does not tell buffers from parameters: without optimizer state it may be either, and goes as both.

    Without an optimizer, floating-point tensors are taken for weights.
    """
    assert item.dtype is not None
    if not item.dtype.is_floating_point:
        kinds = [BUFFER]
    elif not trained or item.path[-1] in trained:
        kinds = [WEIGHT]
    else:
        kinds = [WEIGHT, BUFFER]
    return [_tensor(folder, item, str(item.path[-1]), kind) for kind in kinds]


def _tensor(folder: Path, item: Item, name: str, kind: str) -> SourceTensor:
    where = f"{folder}: {name} ({kind})"
    _check_chunks(item, where)
    for chunk in item.chunks:
        _path(folder, chunk)
    assert item.dtype is not None
    return SourceTensor(name, kind, item.dtype, item.shape, partial(_assemble, folder, item, where))


def _check_chunks(item: Item, where: str) -> None:
    """The chunks are inside the tensor, do not overlap and cover it."""
    boxes = sorted((chunk for chunk in item.chunks if 0 not in chunk.sizes), key=lambda chunk: chunk.start)
    inside = all(
        len(box.start) == len(item.shape)
        and all(s >= 0 and s + n <= size for s, n, size in zip(box.start, box.sizes, item.shape, strict=True))
        for box in boxes
    )
    rows_only = inside and all(box.sizes[1:] == item.shape[1:] for box in boxes)
    pairs = pairwise(boxes) if rows_only else ((a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    numel = sum(torch.Size(box.sizes).numel() for box in boxes)
    if not inside or any(_overlap(a, b) for a, b in pairs) or numel != torch.Size(item.shape).numel():
        raise CheckpointError(
            "the chunks of a tensor do not cover it once", where=where, got=f"{numel} elements in {len(boxes)} chunks",
            wanted=f"shape {item.shape}", remedy="a rank's file is missing from the metadata",
        )  # fmt: skip


def _overlap(a: Chunk, b: Chunk) -> bool:
    return all(x < y + n and y < x + m for x, m, y, n in zip(a.start, a.sizes, b.start, b.sizes, strict=True))


def _path(folder: Path, chunk: Chunk) -> Path:
    path = folder / chunk.file
    if Path(chunk.file).is_absolute() or ".." in Path(chunk.file).parts or not path.is_file():
        raise CheckpointError("a file of the checkpoint is missing", where=str(folder), got=chunk.file)
    return path


def _load(folder: Path, chunk: Chunk, where: str) -> Any:
    with _path(folder, chunk).open("rb") as file:
        file.seek(chunk.offset)
        data = file.read(chunk.length)
    return load_file(io.BytesIO(data), f"{where}, {chunk.file} at {chunk.offset}")


def _assemble(folder: Path, item: Item, where: str) -> Tensor:
    """Memory: the tensor and one chunk."""
    whole = torch.empty(item.shape, dtype=item.dtype)
    for chunk in item.chunks:
        part = _load(folder, chunk, where)
        if not isinstance(part, Tensor) or tuple(part.shape) != chunk.sizes or part.dtype != item.dtype:
            raise CheckpointError("a chunk is not what the metadata say", where=where, got=part, wanted=chunk.sizes)
        view = whole
        for dim, (start, size) in enumerate(zip(chunk.start, chunk.sizes, strict=True)):
            view = view.narrow(dim, start, size)
        view.copy_(part)
    return whole


def _read_rest(folder: Path, source: Source, items: Sequence[Item]) -> None:
    """What is neither model nor optimizer: a step, and the caller's own values where they are plain."""
    for item in items:
        name, where = ".".join(map(str, item.path)), f"{folder}: {'.'.join(map(str, item.path))}"
        try:
            value = _assemble(folder, item, where) if item.dtype else _load(folder, item.chunks[0], where)
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            value = json.loads(json.dumps(value))
        except CheckpointError as error:
            source.notes.append(f"{name} is left out: {error.what}")
        except (TypeError, ValueError):
            source.notes.append(f"{name} is left out: it is no JSON")
        else:
            source.client[name] = value
            if item.path[-1] == "step" and isinstance(value, int):
                source.step = max(source.step, value)


def _read_step(folder: Path, source: Source, items: Sequence[Item]) -> None:
    """The optimizer's own count, where there is one, decides."""
    if items:
        item = items[0]
        value = _assemble(folder, item, "step") if item.dtype else _load(folder, item.chunks[0], "step")
        source.step = int(value)
    source.counters = {"global_steps": source.step, "micro_steps": source.step, "skipped_steps": 0, "skipped_in_row": 0}


def _find_ties(source: Source, trained: set[Any]) -> None:
    """A weight without states but with the bits of a trained one of its shape is a tied parameter's other name."""
    weights = [item for item in source.tensors if item.kind == WEIGHT]
    loose = [item for item in weights if trained and item.name not in trained and len(item.shape) > 1]
    for item in loose:
        twins = [w for w in weights if w.name in trained and (w.shape, w.dtype) == (item.shape, item.dtype)]
        if not twins:
            continue
        own = item.read()
        twin = next((w for w in twins if torch.equal(w.read(), own)), None)
        if twin is not None:
            source.aliases[item.name] = twin.name
            source.tensors = [found for found in source.tensors if found.name != item.name]
