"""safetensors files in any store: headers and ranges read, and files written tensor by tensor.

Neighbours: `folder.py` reads with this, `export.py` writes. The format is 8 bytes of header length, a JSON header with
dtype, shape and place of each tensor, then the elements, little endian.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raydz.checkpoint.data_file import host_bytes
from raydz.checkpoint.pieces import DTYPE_NAMES, DTYPES
from raydz.errors import CheckpointError
from raydz.storage import Store

_MOST_HEADER_BYTES = 100 << 20
_WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, at bytes [start, stop)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(store: Store, key: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    Raises:
        CheckpointError: not a safetensors file, cut off, or of a dtype that torch lacks.
    """
    where = f"{store.uri}/{key}"
    found = store.head(key)
    if found is None:
        raise CheckpointError("a file is missing", where=where)
    length = int.from_bytes(store.get(key, 0, 8, if_match=found.etag), "little")
    if found.bytes < 8 or length > min(_MOST_HEADER_BYTES, found.bytes - 8):
        raise CheckpointError("not a safetensors file", where=where, got=f"{found.bytes} bytes, header of {length}")
    try:
        header: dict[str, Any] = json.loads(store.get(key, 8, 8 + length, if_match=found.etag))
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(name, fields, 8 + length) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("not a safetensors file", where=where, got=repr(error)) from None
    end = max((entry.stop for entry in entries.values()), default=0)
    if end > found.bytes:
        raise CheckpointError("a safetensors file is cut off", where=where, got=found.bytes, wanted=f"{end} bytes")
    return entries, metadata


def _entry(name: str, fields: dict[str, Any], base: int) -> Entry:
    start, stop = fields["data_offsets"]
    entry = Entry(name, DTYPES[fields["dtype"]], tuple(fields["shape"]), base + start, base + stop)
    if stop - start != torch.Size(entry.shape).numel() * entry.dtype.itemsize or start < 0:
        raise ValueError(f"{name}: {stop - start} bytes for {entry.shape}")
    return entry


def read_tensor(store: Store, key: str, entry: Entry) -> Tensor:
    """One tensor, by a ranged read."""
    buffer = bytearray(entry.stop - entry.start)
    if not buffer:
        return torch.empty(entry.shape, dtype=entry.dtype)
    store.read_into(key, entry.start, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=entry.dtype).view(entry.shape)


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write: what its header says, and how to get it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(
    store: Store, key: str, tensors: Sequence[Outgoing], metadata: Mapping[str, str], done: Callable[[int], None]
) -> int:
    """Stream a file; returns its size. Memory: one tensor. The file appears whole, at the end.

    Args:
        done: told the bytes of each tensor that is written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for item in tensors:
        header[item.name] = {
            "dtype": DTYPE_NAMES[item.dtype], "shape": list(item.shape), "data_offsets": [end, end + item.num_bytes],
        }  # fmt: skip
        end += item.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with store.writer(key, 8 + len(text) + end) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for item in tensors:
            for part in _parts(item):
                out.write(part)
            done(item.num_bytes)
    return 8 + len(text) + end


def _parts(item: Outgoing) -> Iterable[memoryview]:
    tensor = item.read()
    assert tensor.dtype == item.dtype and tuple(tensor.shape) == item.shape
    data = host_bytes(tensor.reshape(-1))
    for start in range(0, data.nbytes, _WRITE_BYTES):
        yield data[start : start + _WRITE_BYTES]
