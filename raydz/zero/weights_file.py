"""One safetensors file of whole weights in the dtype that forward reads, streamed a flat group at a time.

Neighbours: `access.py` offers it as `save_16bit_model`; `export.py` brings shards together. Checkpoints, which keep
fp32 masters and states, are `checkpoint/`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from raydz.dist.agreement import on_rank_zero
from raydz.errors import LayoutError
from raydz.storage import Store
from raydz.zero.export import whole_of
from raydz.zero.group import FlatGroup
from raydz.zero.sharded import ShardedModel

_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


def save_weights(sharded: ShardedModel, store: Store, key: str, *, trained_only: bool = False) -> None:
    """Write every parameter (tied ones once, other names in the file's metadata) and persistent buffer.

    Args:
        trained_only: leave frozen parameters out.

    Collective and blocking: every rank. Memory: one flat group in the compute dtype.

    Raises:
        LayoutError: on every rank: safetensors has no name for a dtype.
        StorageError: on every rank: it could not be written, and there is no file.
    """
    sharded.require_present("saving weights", "lp_params")
    groups = [group for group in sharded.groups if group.trainable or not trained_only]
    buffers = _persistent_buffers(sharded)
    header, total_bytes = _header(groups, buffers)
    weights = _whole_weights(groups)

    def write() -> None:
        try:
            with store.writer(key, total_bytes) as out:
                out.write(header)
                for tensor in weights:
                    out.write(_bytes_of(tensor))
                for buffer in buffers.values():
                    out.write(_bytes_of(buffer))
        finally:
            _drain(weights)  # after a failure too: the other ranks are in these gathers

    if sharded.comms.world.rank != 0:
        _drain(weights)
    on_rank_zero(sharded.comms.world, write)


def _drain(weights: Iterator[Tensor]) -> None:
    for _ in weights:
        pass


def _whole_weights(groups: Sequence[FlatGroup]) -> Iterator[Tensor]:
    """Each parameter's values, flat. Collective: every rank, to the end."""
    for group in groups:
        whole = whole_of(group, group.weights.compute)
        for segment in group.layout.segments:
            yield whole[segment.start : segment.stop]


def _persistent_buffers(sharded: ShardedModel) -> dict[str, Tensor]:
    found = {}
    for prefix, module in sharded.model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _header(groups: Sequence[FlatGroup], buffers: dict[str, Tensor]) -> tuple[bytes, int]:
    """safetensors' header for parameters and then buffers, and the size of the whole file."""
    entries: dict[str, Any] = {
        "__metadata__": {alias: s.name for group in groups for s in group.specs for alias in s.aliases}
        | {"format": "pt"}
    }
    tensors = [(s.name, group.dtype, s.shape) for group in groups for s in group.layout.segments]
    tensors += [(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()]
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in _NAMES:
            raise LayoutError("safetensors has no such dtype", where=name, got=dtype, wanted=", ".join(_NAMES.values()))
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-len(text) // 8) * 8
    return padded.to_bytes(8, "little") + text.ljust(padded), 8 + padded + end


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host; no copy for one that is there and contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
