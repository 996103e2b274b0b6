"""One rank's data file: a safetensors header, then raw little-endian elements, with a CRC for every chunk.

Neighbours: `writer.py` writes one a rank and save. Other tools can open it: each piece is a 1-D safetensors tensor
named `kind/name[start:stop]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raydz.checkpoint.checksums import crc_function, default_algorithm
from raydz.checkpoint.manifest import ITEM_BYTES, DataFile
from raydz.checkpoint.pieces import StatePiece
from raydz.storage import Writer

CHUNK_BYTES = 256 << 10
"""Of one checksum, and so of the smallest verified read; see the note "Chunks" in README.md."""
_HEADER_ALIGNMENT = 4096
_WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class FilePlan:
    """Pieces in the order they are written (wide elements first, so that none straddles a chunk), and their offsets."""

    pieces: tuple[StatePiece, ...]
    offsets: tuple[int, ...]
    header: bytes
    total_bytes: int


def plan_file(pieces: Sequence[StatePiece]) -> FilePlan:
    """Lay the pieces out behind a header that is padded to 4096 bytes."""
    ordered = tuple(sorted(pieces, key=lambda piece: -ITEM_BYTES[piece.dtype]))
    entries, end, starts = {}, 0, []
    for piece in ordered:
        size = (piece.stop - piece.start) * ITEM_BYTES[piece.dtype]
        entries[f"{piece.kind}/{piece.name}[{piece.start}:{piece.stop}]"] = {
            "dtype": piece.dtype, "shape": [piece.stop - piece.start], "data_offsets": [end, end + size],
        }  # fmt: skip
        starts.append(end)
        end += size
    text = json.dumps({"__metadata__": {"format": "raydz-1"}, **entries}, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT
    header = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)
    return FilePlan(ordered, tuple(padded + start for start in starts), header, padded + end)


@dataclass
class ChunkSums:
    """The CRC of each `CHUNK_BYTES` of a stream, and of the whole."""

    algorithm: str = field(default_factory=default_algorithm)
    crcs: list[int] = field(default_factory=list)
    whole: int = 0
    _open: int = 0
    _open_bytes: int = 0

    def update(self, data: memoryview) -> None:
        crc = crc_function(self.algorithm, "a new data file")
        while data.nbytes:
            head = data[: CHUNK_BYTES - self._open_bytes]
            self._open = crc(head, self._open)
            self.whole = crc(head, self.whole)  # while the processor's cache still has it
            self._open_bytes += head.nbytes
            data = data[head.nbytes :]
            if self._open_bytes == CHUNK_BYTES:
                self._close()

    def _close(self) -> None:
        self.crcs.append(self._open)
        self._open = self._open_bytes = 0

    def finish(self) -> tuple[int, ...]:
        if self._open_bytes:
            self._close()
        return tuple(self.crcs)


def write_file(plan: FilePlan, out: Writer, path: str) -> DataFile:
    """Stream the planned file into `out`. Memory: one piece in its stored dtype at a time."""
    sums = ChunkSums()
    _send(memoryview(plan.header), out, sums)
    for piece in plan.pieces:
        _send(host_bytes(piece.read()), out, sums)
    crcs = sums.finish()
    return DataFile(path, plan.total_bytes, CHUNK_BYTES, crcs, sums.whole, sums.algorithm)


def _send(data: memoryview, out: Writer, sums: ChunkSums) -> None:
    for start in range(0, data.nbytes, _WRITE_BYTES):
        part = data[start : start + _WRITE_BYTES]
        sums.update(part)
        out.write(part)


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a 1-D tensor on the host; no copy for one that is there and contiguous."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
