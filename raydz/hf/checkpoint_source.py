"""A raydz checkpoint as the start of a conversion or export: merged tensor by tensor, from whatever ranks wrote it.

Neighbours: `detect.py` and `background.py` open one; `checkpoint/reader.py` reads and verifies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raydz.checkpoint import Manifest, StatePiece, TensorEntry, checkpoint_uri
from raydz.checkpoint.load_plan import plan_load
from raydz.checkpoint.pieces import DTYPES
from raydz.checkpoint.reader import CheckpointReader
from raydz.errors import CheckpointError
from raydz.hf.source import BUFFER, WEIGHT, Source, SourceTensor
from raydz.storage import Store

BATCH_BYTES = 64 << 20
"""Small tensors that lie together are read together."""


def open_checkpoint_source(store: Store, folder: str, manifest: Manifest, *, kind: str = WEIGHT) -> Source:
    """The weights and buffers of an opened checkpoint.

    Args:
        kind: what stands for the weights: `ema` is their average, where a parameter has one.

    Raises:
        CheckpointError: nothing of that kind is there.
    """
    where = checkpoint_uri(store, folder)
    entries = sorted(_chosen(manifest, kind, where), key=lambda entry: _by_number(entry.name))
    batches = _Batches(store, folder, manifest, entries)
    tensors = [
        SourceTensor(
            entry.name, BUFFER if entry.kind == BUFFER else WEIGHT, DTYPES[entry.dtype], entry.shape,
            partial(batches.read, number),
        )
        for number, entry in enumerate(entries)
    ]  # fmt: skip
    what = f"a raydz checkpoint of {manifest.world_size} ranks"
    return Source(
        what, where, tensors, aliases=dict(manifest.aliases), step=manifest.step,
        counters=dict(manifest.state.get("engine", {})), model=_model(manifest.state.get("config") or {}),
    )  # fmt: skip


def _by_number(name: str) -> list[Any]:
    """Layer 10 comes after layer 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]


def _chosen(manifest: Manifest, kind: str, where: str) -> list[TensorEntry]:
    kinds = {found for _, found in manifest.tensors}
    if kind not in kinds:
        raise CheckpointError("the checkpoint has nothing of that kind", where=where, got=kind, wanted=sorted(kinds))
    chosen = [entry for (_, found), entry in manifest.tensors.items() if found == BUFFER]
    names = [name for name, found in manifest.tensors if found == WEIGHT]
    return chosen + [manifest.tensors.get((name, kind)) or manifest.tensors[name, WEIGHT] for name in names]


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `model` section of the run that saved it, with its length; sizes that are auto are left to the shapes."""
    section = {name: value for name, value in (config.get("model") or {}).items() if value not in ("auto", None)}
    length = (config.get("data") or {}).get("sequence_length")
    if section and length:
        section.setdefault("max_position_embeddings", length)
    return section


class _Batches:
    """Reads tensors in their order, small ones together; each is given out once."""

    def __init__(self, store: Store, folder: str, manifest: Manifest, entries: Sequence[TensorEntry]) -> None:
        self._manifest, self._entries = manifest, entries
        self._reader = CheckpointReader(store, folder, manifest)
        self._known: set[int] = set()
        self._ready: dict[int, Tensor] = {}

    def read(self, number: int) -> Tensor:
        """Memory: the tensor, or `BATCH_BYTES` where it and those after it are small."""
        if number not in self._ready:
            self._ready = self._load(number)
        return self._ready.pop(number)

    def _load(self, first: int) -> dict[int, Tensor]:
        batch: dict[int, Tensor] = {}
        pieces, total = [], 0
        for number in range(first, len(self._entries)):
            entry = self._entries[number]
            num_bytes = entry.numel * DTYPES[entry.dtype].itemsize
            if batch and total + num_bytes > BATCH_BYTES:
                break
            total += num_bytes
            flat = torch.empty(entry.numel, dtype=DTYPES[entry.dtype])
            batch[number] = flat.view(entry.shape)
            if entry.numel:
                pieces.append(_whole(entry, flat))
        runs = plan_load(self._manifest, pieces, self._reader.where).runs(self._manifest.files)
        new = {run.file for run in runs} - self._known
        self._reader.check_there(new)  # one look at each file, and all reads from that version of it
        self._known |= new
        self._reader.fill(runs)
        return batch


def _whole(entry: TensorEntry, flat: Tensor) -> StatePiece:
    def write(at: int, values: Tensor) -> None:
        flat[at : at + values.numel()].copy_(values)

    return StatePiece((entry.name,), entry.kind, entry.dtype, entry.shape, 0, entry.numel, lambda: flat, write)
