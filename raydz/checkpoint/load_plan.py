"""What a rank must read: its pieces intersected with the stored ones, as chunk-aligned ranges of files.

Neighbours: `reader.py` reads the runs; `manifest.py` says where bytes are. Pure arithmetic: nothing is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raydz.checkpoint.manifest import ITEM_BYTES, DataFile, Manifest, TensorEntry
from raydz.checkpoint.pieces import StatePiece
from raydz.errors import CheckpointError

READ_BYTES = 16 << 20
"""Of one read at most (rounded to chunks)."""


@dataclass(frozen=True)
class Need:
    """Bytes [start, stop) of a file, for elements from `offset` on of a piece."""

    start: int
    stop: int
    piece: StatePiece
    offset: int
    dtype: str


@dataclass(frozen=True)
class Run:
    """Whole chunks, bytes [start, stop) of file number `file`, and the needs that lie in them at least in part."""

    file: int
    start: int
    stop: int
    needs: tuple[Need, ...]

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclass
class LoadPlan:
    """Needs by file number, sorted by position; which stored tensors they are of, and what the checkpoint lacks."""

    needs: dict[int, list[Need]] = field(default_factory=dict)
    taken: set[tuple[str, str]] = field(default_factory=set)
    missing: list[tuple[str, str]] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        return sum(need.stop - need.start for needs in self.needs.values() for need in needs)

    def runs(self, files: Sequence[DataFile]) -> list[Run]:
        """What to read, in the order of files and positions: the same on every rank that has the same needs."""
        return [run for index in sorted(self.needs) for run in _runs(index, files[index], self.needs[index])]


def plan_load(manifest: Manifest, pieces: Iterable[StatePiece], where: str) -> LoadPlan:
    """Intersect pieces with what is stored.

    Raises:
        CheckpointError: a stored tensor has another shape.
    """
    plan = LoadPlan()
    for piece in pieces:
        entry = manifest.entry(list(piece.names), piece.kind)
        if entry is None:
            plan.missing.append((piece.name, piece.kind))
            continue
        if entry.shape != piece.shape:
            raise CheckpointError(
                "a stored tensor has another shape", where=f"{where}: {piece.name}", got=entry.shape,
                wanted=piece.shape, remedy="load it into the model it was saved from, or leave it out with `only`",
            )  # fmt: skip
        plan.taken.add((entry.name, entry.kind))
        for file, need in _needs_of(piece, entry):
            plan.needs.setdefault(file, []).append(need)
    for needs in plan.needs.values():
        needs.sort(key=lambda need: need.start)
    return plan


def _needs_of(piece: StatePiece, entry: TensorEntry) -> Iterable[tuple[int, Need]]:
    width = ITEM_BYTES[entry.dtype]
    for stored in entry.columns.overlapping(piece.start, piece.stop):
        low, high = max(piece.start, stored.start), min(piece.stop, stored.stop)
        if low < high:
            begin = stored.offset + (low - stored.start) * width
            yield stored.file, Need(begin, begin + (high - low) * width, piece, low - piece.start, entry.dtype)


def _runs(index: int, data_file: DataFile, needs: Sequence[Need]) -> Iterable[Run]:
    """Cut the chunks that hold the needs into reads of at most `READ_BYTES`; each chunk is read once."""
    size = data_file.chunk_bytes
    per_read = max(1, READ_BYTES // size)
    first = last = -1  # chunks [first, last) of the open run
    held: list[Need] = []
    for need in needs:
        chunk, end = need.start // size, -(-need.stop // size)
        while chunk < end:
            if first >= 0 and (chunk > last or (chunk == last and last - first == per_read)):
                yield Run(index, first * size, min(last * size, data_file.bytes), tuple(held))
                first, held = -1, []
            if first < 0:
                first = last = chunk
            if not held or held[-1] is not need:
                held.append(need)
            last = max(last, min(end, first + per_read))
            chunk = last
    if first >= 0:
        yield Run(index, first * size, min(last * size, data_file.bytes), tuple(held))
