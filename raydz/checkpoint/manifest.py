"""The manifest: which interval of which logical tensor lies where, and everything else that resuming needs.

Neighbours: `writer.py` makes one and writes it last; `reader.py` plans by it; `find.py` looks for it. JSON, never
pickle. The format is described in README.md, "Format"; what one release wrote, every later one reads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from raydz.checkpoint.columns import Piece, Pieces, Sums, join_columns
from raydz.checkpoint.encoding import pack_column, pack_sums, unpack_column, unpack_sums
from raydz.checkpoint.garbage import collection_paused
from raydz.errors import CheckpointError

FORMAT_VERSION = 2
"""What is written; 1 is read, too."""
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class DataFile:
    """A data file: key relative to the checkpoint's folder, size, and a CRC for every chunk and for the whole."""

    path: str
    bytes: int
    chunk_bytes: int
    chunk_crcs: Sequence[int]
    crc: int
    algorithm: str = "crc32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk_crcs", Sums.of(self.chunk_crcs))

    def as_json(self) -> dict[str, Any]:
        """JSON values, the checksums of chunks packed (there are thousands in a large file)."""
        return {**vars(self), "chunk_crcs": pack_sums(Sums.of(self.chunk_crcs))}

    @classmethod
    def from_json(cls, values: dict[str, Any], where: str) -> DataFile:
        """What `as_json` made, or a manifest of format 1, which has the checksums as a list."""
        sums = values["chunk_crcs"]
        return cls(**{**values, "chunk_crcs": unpack_sums(sums, where) if isinstance(sums, str) else sums})


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor: one (name, kind), its whole shape, and where its pieces are, in order."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[Piece]

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", Pieces.of(self.pieces))

    @property
    def columns(self) -> Pieces:
        """The pieces, in the form that they are in."""
        return Pieces.of(self.pieces)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint.

    Attributes:
        step: committed optimizer steps.
        attempt: random name of the save that wrote the data files.
        tensors: by (name, kind).
        aliases: other names of tied parameters -> the name they are stored under.
        state: whatever resuming needs besides tensors (data position, schedule, configuration, run ids).
    """

    step: int
    world_size: int
    attempt: str
    created: float
    raydz_version: str
    files: tuple[DataFile, ...]
    tensors: dict[tuple[str, str], TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def generation(self) -> str | None:
        """Of the start of the run that committed it; None outside runs."""
        tag = self.state.get("generation")
        return tag if isinstance(tag, str) else None

    def entry(self, names: list[str], kind: str) -> TensorEntry | None:
        """The tensor stored under any of the names, tied names included."""
        for name in names:
            found = self.tensors.get((name, kind)) or self.tensors.get((self.aliases.get(name, name), kind))
            if found:
                return found
        return None

    def check_coverage(self, where: str) -> None:
        """Every tensor is covered once, by pieces that lie inside their files.

        Raises:
            CheckpointError: a gap, an overlap, or a piece outside its file; names the tensor and the elements.
        """
        if not _is_covered(list(self.tensors.values()), self.files):
            for entry in self.tensors.values():
                self._name_fault(entry, where)

    def _name_fault(self, entry: TensorEntry, where: str) -> None:
        """The same, piece by piece."""
        end = 0
        for piece in entry.pieces:
            if piece.start != end or piece.stop <= end:
                kind = "a gap" if piece.start > end else "an overlap"
                raise CheckpointError(
                    f"{kind} in a stored tensor", where=f"{where}: {entry.name} ({entry.kind})",
                    got=f"element {piece.start} follows {end}", wanted="pieces that cover it once",
                )  # fmt: skip
            end = piece.stop
            size = (piece.stop - piece.start) * ITEM_BYTES[entry.dtype]
            file_bytes = self.files[piece.file].bytes if 0 <= piece.file < len(self.files) else 0
            if not 0 <= piece.offset <= file_bytes - size:
                raise CheckpointError(
                    "a piece lies outside its file", where=f"{where}: {entry.name} ({entry.kind})",
                    got=f"file {piece.file}, bytes {piece.offset} to {piece.offset + size}",
                    wanted=f"at most {file_bytes} bytes",
                )  # fmt: skip
        if end != entry.numel:
            raise CheckpointError(
                "a stored tensor is not whole", where=f"{where}: {entry.name} ({entry.kind})",
                got=f"{end} elements", wanted=entry.numel,
            )  # fmt: skip

    @collection_paused()
    def to_bytes(self) -> bytes:
        """Canonical JSON with a SHA-256 of its body; a run's begins with its generation, for `generations.tag_of`."""
        long = ("files", "tensors")
        body: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in long}
        body["format_version"] = FORMAT_VERSION
        body["files"] = [file.as_json() for file in self.files]
        entries = [entry for _, entry in sorted(self.tensors.items())]
        body["tensors"] = [[e.name, e.kind, e.dtype, list(e.shape), len(e.pieces)] for e in entries]
        columns = join_columns([entry.columns for entry in entries])
        body["pieces"] = {
            name: pack_column(column) for name, column in zip(Piece._fields, columns, strict=True) if column.size
        }
        for name in ("aliases", "state"):  # what a reader will see: keys that are numbers sort as text there
            body[name] = json.loads(json.dumps(body[name]))
        text = _canonical(body)
        head = f'"generation": "{self.generation}",\n' if self.generation else ""
        return f'{{{head}"sha256": "{hashlib.sha256(text.encode()).hexdigest()}",\n"body": {text}}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Read and verify.

        Raises:
            CheckpointError: not a manifest, damaged, or of a format this release does not know.
        """
        try:
            outer = json.loads(data)
            body, digest = outer["body"], outer["sha256"]
            version = body["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError("not a checkpoint manifest", where=where, got=repr(error)) from None
        if version not in (1, FORMAT_VERSION) or isinstance(version, bool):
            raise CheckpointError(
                "a checkpoint of another format", where=where, got=version, wanted=f"1 or {FORMAT_VERSION}",
                remedy="load it with the release of raydz that wrote it, or a newer one",
            )  # fmt: skip
        if hashlib.sha256(_canonical(body).encode()).hexdigest() != digest:
            raise CheckpointError("the manifest is damaged: its checksum does not fit", where=where)
        del body["format_version"]
        entries = list(_entries(body, where) if version == FORMAT_VERSION else _entries_of_format_1(body))
        files = tuple(DataFile.from_json(file, where) for file in body.pop("files"))
        manifest = cls(files=files, tensors={(e.name, e.kind): e for e in entries}, **body)
        manifest.check_coverage(where)
        return manifest


def _entries(body: dict[str, Any], where: str) -> Iterable[TensorEntry]:
    """Takes `tensors` and `pieces` out of the body."""
    heads, packed = body.pop("tensors"), body.pop("pieces")
    total = sum(head[4] for head in heads)
    columns = np.zeros((len(Piece._fields), total), np.int64)
    for row, name in enumerate(Piece._fields):
        if total:
            columns[row] = unpack_column(packed[name], total, where)
    first = 0
    for name, kind, dtype, shape, count in heads:
        yield TensorEntry(name, kind, dtype, tuple(shape), Pieces(columns[:, first : first + count]))
        first += count


def _entries_of_format_1(body: dict[str, Any]) -> Iterable[TensorEntry]:
    for name, kind, dtype, shape, pieces in body.pop("tensors"):
        yield TensorEntry(name, kind, dtype, tuple(shape), tuple(Piece(*piece) for piece in pieces))


ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of an element, by safetensors' names of dtypes."""


def _canonical(body: dict) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _is_covered(entries: Sequence[TensorEntry], files: Sequence[DataFile]) -> bool:
    """Whether every tensor is covered once by pieces inside their files, for all at once."""
    counts = np.array([len(entry.pieces) for entry in entries], np.int64)
    start, stop, file, offset = join_columns([entry.columns for entry in entries])
    last = np.cumsum(counts) - 1
    ends = [int(stop[index]) if count else 0 for index, count in zip(last.tolist(), counts.tolist(), strict=True)]
    if ends != [entry.numel for entry in entries]:
        return False
    if not start.size:
        return True
    before = np.roll(stop, 1)
    before[(last - counts + 1)[counts > 0]] = 0
    if (start != before).any() or (stop <= start).any() or file.min() < 0 or file.max() >= len(files):
        return False
    size = (stop - start) * np.repeat([ITEM_BYTES[entry.dtype] for entry in entries], counts)
    room = np.array([each.bytes for each in files], np.int64)[file] - size
    return bool(((offset >= 0) & (offset <= room)).all())
