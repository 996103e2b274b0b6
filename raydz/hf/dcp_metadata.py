"""The `.metadata` of torch's distributed checkpoints, which is a pickle: read by an unpickler that runs nothing.

Neighbours: `dcp.py` alone. Every class that DCP itself writes there has an inert stand-in; any other name in the file,
a function above all, is an error before it is looked up.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from raydz.errors import CheckpointError


class _Record:
    """Takes the place of one of DCP's own objects: keeps what it was built with and does nothing."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        self.arguments = arguments
        self.__dict__.update(fields)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _TensorEntry(_Record):
    properties: Any
    size: tuple[int, ...]
    chunks: list[Any]


class _Index(_Record):
    fqn: str
    offset: tuple[int, ...] | None = None


def _size(sizes: Any = ()) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    **{
        (_METADATA, name): _Record
        for name in (
            "Metadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (_METADATA, "TensorStorageMetadata"): _TensorEntry,
    (_METADATA, "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): OrderedDict,
    **{("pathlib", name): _Record for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")},
    **{("pathlib._local", name): _Record for name in ("PosixPath", "WindowsPath")},
    **{
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in (
            torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
            torch.int8, torch.uint8, torch.bool,
        )
    },
}  # fmt: skip


class _NothingRuns(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of a known name."""
        if (module, name) not in _KNOWN:
            raise _Refused(f"{module}.{name}")
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """DCP writes none."""
        raise _Refused("a persistent id")


class _Refused(pickle.UnpicklingError):
    """What the file asked for."""


@dataclass(frozen=True)
class Chunk:
    """Where a box of a tensor lies: bytes [offset, offset + length) of a file hold a tensor that torch saved."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Item:
    """One value of the state dict: a tensor in chunks, or (`dtype` None) an object in one.

    Args:
        path: the keys that lead to it.
    """

    path: tuple[Any, ...]
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(data: bytes, where: str) -> list[Item]:
    """The items of a checkpoint, in the order in which they were saved.

    Raises:
        CheckpointError: not DCP's metadata; damaged; or it names anything but DCP's own classes.
    """
    try:
        root = _NothingRuns(io.BytesIO(data)).load()
    except _Refused as error:
        raise CheckpointError(
            "the metadata asks for Python code that DCP does not write; nothing of it was run", where=where, got=error,
            wanted="DCP's own classes alone", remedy="get the checkpoint again from where it was made",
        ) from None  # fmt: skip
    except Exception as error:  # a pickle machine given garbage raises whatever its opcodes hit
        raise CheckpointError("not DCP's metadata, or damaged", where=where, got=repr(error)) from None
    try:
        paths = root.planner_data or {}
        stored = {(index.fqn, index.offset): info for index, info in root.storage_data.items()}
        return [
            _item(name, tuple(paths.get(name, (name,))), entry, stored)
            for name, entry in root.state_dict_metadata.items()
        ]
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        raise CheckpointError(
            "DCP's metadata lack something", where=where, got=repr(error), wanted="what torch 2.4 and later write"
        ) from None


def _item(name: str, path: tuple[Any, ...], entry: Any, stored: dict[Any, Any]) -> Item:
    if not isinstance(entry, _TensorEntry):
        return Item(path, None, (), (_chunk((), (), stored[name, None]),))
    properties = entry.properties
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    chunks = tuple(_chunk(c.offsets, c.sizes, stored[name, c.offsets]) for c in entry.chunks)
    return Item(path, dtype, entry.size, chunks)


def _chunk(start: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> Chunk:
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"compressed by {info.transform_descriptors}")
    return Chunk(tuple(start), tuple(sizes), str(info.relative_path), int(info.offset), int(info.length))
