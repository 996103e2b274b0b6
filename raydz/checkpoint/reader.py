"""Loading: intersect what a rank holds with what is stored, and read just those chunks, verified.

Neighbours: `engine.py` calls `load_pieces`; `manifest.py` says where bytes are. Stage, world size and dtype may
differ from those of the save; nothing is converted and ranks do not talk.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from raydz.checkpoint.find import checkpoint_uri, join_key
from raydz.checkpoint.manifest import ITEM_BYTES, DataFile, Manifest
from raydz.checkpoint.pieces import DTYPES, StatePiece
from raydz.errors import CheckpointError
from raydz.storage import Store

_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class Need:
    """Bytes [start, stop) of a file, for elements from `offset` on of a piece."""

    start: int
    stop: int
    piece: StatePiece
    offset: int
    dtype: str


def load_pieces(store: Store, folder: str, manifest: Manifest, pieces: Iterable[StatePiece]) -> int:
    """Fill every piece from the checkpoint in `folder`; returns the bytes read.

    Memory: one read of at most 16 MiB (rounded to chunks) at a time. Nothing is written before the plan of all
    pieces is complete and all their files are there in full size, so a checkpoint that does not fit the model or
    lacks a file changes nothing. A damaged chunk is found when it is read: pieces read before it are loaded.

    Raises:
        CheckpointError: a tensor is missing or has another shape; a file is missing, short or damaged (names file
            and chunk).
    """
    where = checkpoint_uri(store, folder)
    needs = plan_load(manifest, pieces, where)
    files = {index: manifest.files[index] for index in sorted(needs)}
    keys = {index: join_key(folder, data_file.path) for index, data_file in files.items()}
    etags = {index: _check_there(store, keys[index], data_file, where) for index, data_file in files.items()}
    total = 0
    for index, data_file in files.items():
        for start, buffer in _read_chunks(store, keys[index], etags[index], data_file, needs[index]):
            _verify(memoryview(buffer), start, data_file, where)
            _hand_over(needs[index], buffer, start)
            total += len(buffer)
    return total


def plan_load(manifest: Manifest, pieces: Iterable[StatePiece], where: str) -> dict[int, list[Need]]:
    """Needs by file number, sorted by position."""
    needs: dict[int, list[Need]] = {}
    missing: list[str] = []
    for piece in pieces:
        entry = manifest.entry(list(piece.names), piece.kind)
        if entry is None:
            missing.append(f"{piece.name} ({piece.kind})")
            continue
        if entry.shape != piece.shape:
            raise CheckpointError(
                "a stored tensor has another shape", where=f"{where}: {piece.name}", got=entry.shape,
                wanted=piece.shape, remedy="load it into the model it was saved from",
            )  # fmt: skip
        width = ITEM_BYTES[entry.dtype]
        for stored in entry.pieces:
            low, high = max(piece.start, stored.start), min(piece.stop, stored.stop)
            if low < high:
                first = stored.offset + (low - stored.start) * width
                need = Need(first, first + (high - low) * width, piece, low - piece.start, entry.dtype)
                needs.setdefault(stored.file, []).append(need)
    if missing:
        raise CheckpointError(
            "the checkpoint lacks tensors of this model", where=where,
            got=f"{len(missing)} missing: {', '.join(dict.fromkeys(missing[:5]))}", wanted="all of them",
            remedy="load it into the model it was saved from",
        )  # fmt: skip
    return {index: sorted(found, key=lambda need: need.start) for index, found in needs.items()}


def _runs(needs: Sequence[Need], chunk_bytes: int, file_bytes: int) -> Iterator[tuple[int, int]]:
    """Chunk-aligned byte ranges that cover the needs, each of at most `_READ_BYTES`."""
    per_read = max(1, _READ_BYTES // chunk_bytes)
    chunks = sorted({c for n in needs for c in range(n.start // chunk_bytes, -(-n.stop // chunk_bytes))})
    first = 0
    for i in range(1, len(chunks) + 1):
        ends = i == len(chunks) or chunks[i] != chunks[i - 1] + 1 or i - first == per_read
        if ends:
            yield chunks[first] * chunk_bytes, min((chunks[i - 1] + 1) * chunk_bytes, file_bytes)
            first = i


def _check_there(store: Store, key: str, data_file: DataFile, where: str) -> str:
    """The etag of a file that is there in full size."""
    found = store.head(key)
    if found is None or found.bytes != data_file.bytes:
        raise CheckpointError(
            "a data file is missing" if found is None else "a data file has the wrong size",
            where=f"{where}: {data_file.path}", got=found and f"{found.bytes} bytes",
            wanted=f"{data_file.bytes} bytes", remedy="load an earlier checkpoint",
        )  # fmt: skip
    return found.etag


def _read_chunks(
    store: Store, key: str, etag: str, data_file: DataFile, needs: Sequence[Need]
) -> Iterator[tuple[int, bytearray]]:
    """Byte positions and the bytes there, until all needs are covered; all from one version of the file."""
    for start, stop in _runs(needs, data_file.chunk_bytes, data_file.bytes):
        buffer = bytearray(stop - start)
        store.read_into(key, start, memoryview(buffer), if_match=etag)
        yield start, buffer


def _verify(buffer: memoryview, start: int, data_file: DataFile, where: str) -> None:
    if data_file.algorithm != "crc32":
        raise CheckpointError("unknown checksum", where=f"{where}: {data_file.path}", got=data_file.algorithm)
    for low in range(0, len(buffer), data_file.chunk_bytes):
        index = (start + low) // data_file.chunk_bytes
        if zlib.crc32(buffer[low : low + data_file.chunk_bytes]) != data_file.chunk_crcs[index]:
            raise CheckpointError(
                "a data file is damaged: a checksum does not fit", where=f"{where}: {data_file.path}, chunk {index}",
                got=f"bytes {start + low} to {start + low + data_file.chunk_bytes}", wanted="what was written",
                remedy="load an earlier checkpoint, or restore the file from a copy",
            )  # fmt: skip


def _hand_over(needs: Sequence[Need], buffer: bytearray, start: int) -> None:
    """Write what lies in the bytes [start, start + len(buffer)) to the pieces that need it."""
    stop = start + len(buffer)
    for need in needs:
        if need.stop <= start:
            continue
        if need.start >= stop:
            break  # they are sorted by start
        low, high = max(need.start, start), min(need.stop, stop)
        width = ITEM_BYTES[need.dtype]
        values = torch.frombuffer(buffer, dtype=DTYPES[need.dtype], offset=low - start, count=(high - low) // width)
        need.piece.write(need.offset + (low - need.start) // width, values)
