"""What of an engine's state this rank saves or loads, as intervals of logical tensors.

Neighbours: `writer.py` reads the pieces, `reader.py` writes them; `zero/layout.py` has the intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raydz.dist import Communicator
from raydz.errors import LayoutError
from raydz.ops.rounding import merge_master
from raydz.optim import WeightShard
from raydz.zero import Communicators, ShardedModel, ShardedOptimizer
from raydz.zero.average import KIND, ShardedAverage
from raydz.zero.group import FlatGroup
from raydz.zero.layout import Interval
from raydz.zero.states import GroupStates

DTYPE_NAMES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_MERGE_NUMEL = 16 << 20
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class StatePiece:
    """Elements [start, stop) of the flattened tensor (name, kind), and how to get at them.

    Args:
        names: the name it is stored under, then the other names of a tied parameter.
        dtype: safetensors' name of the dtype it is stored in.
        read: the elements, 1-D in that dtype; may be a view of live memory.
        write: (offset, values) puts values at an offset from `start`, converting as needed.
        copy: puts the elements into a 1-D host tensor of that dtype; None where `read` gives live memory.
    """

    names: tuple[str, ...]
    kind: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    read: Callable[[], Tensor]
    write: Callable[[int, Tensor], None]
    copy: Callable[[Tensor], None] | None = None
    holders: Literal["one", "replicas", "world"] = "one"
    """Ranks that hold the same piece: a load reads it once for all of them."""

    @property
    def name(self) -> str:
        return self.names[0]


def state_pieces(
    sharded: ShardedModel, optimizer: ShardedOptimizer, *, saving: bool, average: ShardedAverage | None = None
) -> list[StatePiece]:
    """This rank's pieces: for saving each element once over all ranks, for loading all that this rank holds.

    Order: module order, the same on every rank with the same layout.
    """
    sharded.require_present("a checkpoint")
    states = dict(zip((id(group) for group in optimizer.groups), optimizer.group_states, strict=True))
    pieces: list[StatePiece] = []
    for group in sharded.groups:
        part = _saved_part(group, sharded.comms.replica) if saving else group.owned
        averaged = None if average is None else average.of(group)
        found = _group_pieces(group, states.get(id(group)), averaged, *part)
        pieces += found if saving else [replace(piece, holders=_holders(group, sharded.comms)) for piece in found]
    if not saving or sharded.comms.world.rank == 0:
        pieces += [replace(piece, holders="world") for piece in _buffer_pieces(sharded)]
    return pieces


def _holders(group: FlatGroup, comms: Communicators) -> Literal["one", "replicas", "world"]:
    if group.owned == (0, group.layout.padded_numel):
        return "world"
    return "one" if comms.replica is None else "replicas"


def _saved_part(group: FlatGroup, replica: Communicator | None) -> tuple[int, int]:
    """Elements [start, stop) of the group that this rank saves: of what replicas hold alike, each a part."""
    start, stop = group.layout.shard_range(group.comm.rank)
    if replica is None:
        return start, stop
    cuts = [start + (stop - start) * i // replica.world_size for i in (replica.rank, replica.rank + 1)]
    return cuts[0], cuts[1]


def _group_pieces(
    group: FlatGroup, states: GroupStates | None, averaged: Tensor | None, start: int, stop: int
) -> Iterator[StatePiece]:
    first = group.owned[0]
    names = {spec.name: (spec.name, *spec.aliases) for spec in group.specs}
    for part in group.layout.intervals(start, stop):
        offset = part.offset + start - first  # from the start of what the group owns
        yield _weight_piece(group, names[part.name], part, offset)
        end = offset + part.stop - part.start
        kinds = {} if states is None else states.of(offset, end)
        if averaged is not None:
            kinds[KIND] = averaged[offset:end]
        for kind, tensor in kinds.items():
            yield _tensor_piece(names[part.name], kind, part, tensor)


def _weight_piece(group: FlatGroup, names: tuple[str, ...], part: Interval, offset: int) -> StatePiece:
    weights = group.weights.slice(offset, offset + part.stop - part.start)
    if not group.trainable:
        return _tensor_piece(names, "weight", part, weights.compute)

    is_master = weights.low is None and weights.separate is None

    def write(at: int, values: Tensor) -> None:
        target = weights.slice(at, at + values.numel())
        if is_master and target.home is None and values.dtype == target.compute.dtype:
            _put(values, target.compute)
        else:
            target.store(values.float())

    dtype = _dtype_name(names[0], weights.compute) if is_master else "F32"
    copy = None if weights.low is None else partial(_copy_master, weights)
    return StatePiece(names, "weight", dtype, part.shape, part.start, part.stop, weights.master, write, copy)


def _copy_master(weights: WeightShard, out: Tensor) -> None:
    """Merge a split master into host memory. Memory on a GPU: `_MERGE_NUMEL` elements at a time."""
    assert weights.low is not None
    if not weights.low.is_cuda:
        merge_master(weights.updated, weights.low, out)
        return
    for start in range(0, out.numel(), _MERGE_NUMEL):
        stop = min(start + _MERGE_NUMEL, out.numel())
        out[start:stop].copy_(weights.slice(start, stop).master(), non_blocking=True)


def _tensor_piece(names: tuple[str, ...], kind: str, part: Interval, live: Tensor) -> StatePiece:
    def write(at: int, values: Tensor) -> None:
        _put(values, live[at : at + values.numel()])

    dtype = _dtype_name(names[0], live)
    return StatePiece(names, kind, dtype, part.shape, part.start, part.stop, lambda: live, write)


def _put(values: Tensor, live: Tensor) -> None:
    """Copy; the same bits on the same host by the calling thread alone.

    Many threads load at once. torch would start a team of OpenMP for each of them, which wait for each other by
    spinning: on two busy cores that took five times as long.
    """
    if live.is_cuda or values.is_cuda or live.dtype != values.dtype or not live.is_contiguous():
        live.copy_(values)
    elif values.numel():
        np.copyto(live.view(torch.uint8).numpy(), values.view(torch.uint8).numpy())


def _buffer_pieces(sharded: ShardedModel) -> Iterator[StatePiece]:
    for prefix, module in sharded.model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            part = Interval(full_name, tuple(buffer.shape), 0, buffer.numel(), 0)
            yield _tensor_piece((full_name,), "buffer", part, buffer.detach().view(-1))


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in DTYPE_NAMES:
        raise LayoutError("a dtype that checkpoints do not store", where=name, got=tensor.dtype)
    return DTYPE_NAMES[tensor.dtype]
