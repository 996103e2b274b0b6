"""What of an engine's state this rank saves or loads, as intervals of logical tensors.

Neighbours: `writer.py` reads the pieces, `reader.py` writes them; `zero/layout.py` has the intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.dist import Communicator
from raydz.errors import LayoutError
from raydz.zero import ShardedModel, ShardedOptimizer
from raydz.zero.average import KIND, ShardedAverage
from raydz.zero.group import FlatGroup
from raydz.zero.layout import Interval
from raydz.zero.states import GroupStates

DTYPE_NAMES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class StatePiece:
    """Elements [start, stop) of the flattened tensor (name, kind), and how to get at them.

    Args:
        names: the name it is stored under, then the other names of a tied parameter.
        dtype: safetensors' name of the dtype it is stored in.
        read: the elements, 1-D in that dtype; may be a view of live memory.
        write: (offset, values) puts values at an offset from `start`, converting as needed.
    """

    names: tuple[str, ...]
    kind: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    read: Callable[[], Tensor]
    write: Callable[[int, Tensor], None]

    @property
    def name(self) -> str:
        return self.names[0]


def state_pieces(
    sharded: ShardedModel, optimizer: ShardedOptimizer, *, saving: bool, average: ShardedAverage | None = None
) -> list[StatePiece]:
    """This rank's pieces: for saving each element once over all ranks, for loading all that this rank holds.

    Order: module order, the same on every rank with the same layout.
    """
    states = dict(zip((id(group) for group in optimizer.groups), optimizer.group_states, strict=True))
    pieces: list[StatePiece] = []
    for group in sharded.groups:
        part = _saved_part(group, sharded.comms.replica) if saving else group.owned
        averaged = None if average is None else average.of(group)
        pieces += _group_pieces(group, states.get(id(group)), averaged, *part)
    if not saving or sharded.comms.world.rank == 0:
        pieces += _buffer_pieces(sharded)
    return pieces


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
    if weights.low is None and weights.separate is None:
        return _tensor_piece(names, "weight", part, weights.compute)

    def write(at: int, values: Tensor) -> None:
        weights.slice(at, at + values.numel()).store(values.float())

    return StatePiece(names, "weight", "F32", part.shape, part.start, part.stop, weights.master, write)


def _tensor_piece(names: tuple[str, ...], kind: str, part: Interval, live: Tensor) -> StatePiece:
    def write(at: int, values: Tensor) -> None:
        live[at : at + values.numel()].copy_(values)

    dtype = _dtype_name(names[0], live)
    return StatePiece(names, kind, dtype, part.shape, part.start, part.stop, lambda: live, write)


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
