"""What two checkpoints hold differently, tensor by tensor, whatever stage and world size wrote them.

Neighbours: `raydz checkpoint diff` prints this; `reader.py` reads and verifies. Both are read in parts of the same
elements, so that memory does not depend on their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raydz.checkpoint.load_plan import plan_load
from raydz.checkpoint.manifest import ITEM_BYTES, Manifest, TensorEntry
from raydz.checkpoint.pieces import DTYPES, StatePiece
from raydz.checkpoint.reader import CheckpointReader
from raydz.checkpoint.verify import Done
from raydz.errors import CheckpointError
from raydz.storage import Store

_BATCH_BYTES = 32 << 20
"""Of one side, read at a time."""

_CACHED_NUMEL = 32 << 10
"""Elements that are compared at a time: what is computed of them stays in the processor's cache, and torch keeps so few
to one thread, where a team of them would spin while the reading ones need the processor."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

What = Literal["only in A", "only in B", "shape", "dtype", "values"]


@dataclass(frozen=True)
class Side:
    """An opened checkpoint."""

    store: Store
    folder: str
    manifest: Manifest


@dataclass(frozen=True)
class Difference:
    """Of one (name, kind), by A's name.

    Attributes:
        what: `values` where shape and dtype are equal; `dtype` only names dtypes if `num_different` is 0.
        a, b: dtype and shape of each side; None where it has none.
        num_different: elements; of equal dtypes in their bits, else in their value.
        max_abs: the greatest |a - b|; infinite where one of the two is not a number.
    """

    name: str
    kind: str
    what: What
    a: str | None
    b: str | None
    num_elements: int = 0
    num_different: int = 0
    max_abs: float = 0.0


@dataclass
class Comparison:
    """Tensors that were compared, and what differs; `state` are keys of what lies beside the tensors."""

    num_tensors: int = 0
    differences: list[Difference] = field(default_factory=list)
    state: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Of the tensors alone: times and names of runs differ between any two."""
        return not self.differences


@dataclass
class _Pair:
    """A tensor that both have, and what has been found of it so far."""

    a: TensorEntry
    b: TensorEntry
    num_different: int = 0
    max_abs: float = 0.0


@dataclass(frozen=True)
class _Part:
    pair: _Pair
    start: int
    stop: int


def compare(a: Side, b: Side, patterns: Sequence[str] = (), done: Done = lambda num_bytes: None) -> Comparison:
    """Compare all tensors, or those whose name or `kind/name` matches one of the patterns (globs).

    Memory: 32 MiB of either side, and the reads in flight.

    Raises:
        CheckpointError: a file is missing or damaged, or a pattern matches nothing on either side.
    """
    _check_patterns(a, b, patterns)
    found, pairs = Comparison(), []
    for entry in sorted(_chosen(a, patterns), key=_place):
        other = b.manifest.entry([entry.name], entry.kind)
        if other is None:
            found.differences.append(Difference(entry.name, entry.kind, "only in A", _shown(entry), None))
        elif other.shape != entry.shape:
            found.differences.append(Difference(entry.name, entry.kind, "shape", _shown(entry), _shown(other)))
        else:
            pairs.append(_Pair(entry, other))
    for entry in _chosen(b, patterns):
        if a.manifest.entry([entry.name], entry.kind) is None:
            found.differences.append(Difference(entry.name, entry.kind, "only in B", None, _shown(entry)))
    reading = _Reading(a), _Reading(b)
    for batch in _batches(pairs):
        _compare_batch(batch, reading, done)
    found.num_tensors = len(pairs) + len(found.differences)
    found.differences += [_difference(pair) for pair in pairs if _differs(pair)]
    found.differences.sort(key=lambda each: (each.name, each.kind))
    found.state = _state_keys(a.manifest.state, b.manifest.state)
    return found


def _chosen(side: Side, patterns: Sequence[str]) -> Iterable[TensorEntry]:
    return [entry for entry in side.manifest.tensors.values() if not patterns or _matches(entry, patterns)]


def _matches(entry: TensorEntry, patterns: Sequence[str]) -> bool:
    names = (entry.name, f"{entry.kind}/{entry.name}")
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _check_patterns(a: Side, b: Side, patterns: Sequence[str]) -> None:
    entries = [*a.manifest.tensors.values(), *b.manifest.tensors.values()]
    idle = [pattern for pattern in patterns if not any(_matches(entry, [pattern]) for entry in entries)]
    if idle:
        raise CheckpointError(
            "a pattern matches no tensor of either checkpoint", got=", ".join(idle),
            wanted="a glob of names, or of kind/name such as weight/*",
        )  # fmt: skip


def _place(entry: TensorEntry) -> tuple[int, int]:
    """Neighbours in A's files are read together."""
    return (entry.pieces[0].file, entry.pieces[0].offset) if entry.pieces else (-1, 0)


def _shown(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _batches(pairs: Iterable[_Pair]) -> Iterator[list[_Part]]:
    """Parts of tensors, together at most `_BATCH_BYTES` on the wider side."""
    batch: list[_Part] = []
    room = _BATCH_BYTES
    for pair in pairs:
        width = max(ITEM_BYTES[pair.a.dtype], ITEM_BYTES[pair.b.dtype])
        start = 0
        while start < pair.a.numel:
            count = min(pair.a.numel - start, room // width)
            if count:
                batch.append(_Part(pair, start, start + count))
                start, room = start + count, room - count * width
            if start < pair.a.numel:
                yield batch
                batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


class _Reading:
    """Reads elements of one side; looks at each file once, and reads from that version of it."""

    def __init__(self, side: Side) -> None:
        self._manifest = side.manifest
        self._reader = CheckpointReader(side.store, side.folder, side.manifest)
        self._seen: set[int] = set()

    def read(self, batch: Sequence[_Part], entries: Sequence[TensorEntry]) -> list[Tensor]:
        """The elements of each part, (n,)."""
        flats = [torch.empty(p.stop - p.start, dtype=DTYPES[e.dtype]) for p, e in zip(batch, entries, strict=True)]
        pieces = [_piece(*each) for each in zip(batch, entries, flats, strict=True)]
        runs = plan_load(self._manifest, pieces, self._reader.where).runs(self._manifest.files)
        new = {run.file for run in runs} - self._seen
        self._reader.check_there(new)
        self._seen |= new
        self._reader.fill(runs)
        return flats


def _compare_batch(batch: Sequence[_Part], reading: tuple[_Reading, _Reading], done: Done) -> None:
    """Read both sides of every part and note what differs."""
    firsts = reading[0].read(batch, [part.pair.a for part in batch])
    seconds = reading[1].read(batch, [part.pair.b for part in batch])
    for part, first, second in zip(batch, firsts, seconds, strict=True):
        num_different, max_abs = distance(first, second)
        part.pair.num_different += num_different
        part.pair.max_abs = max(part.pair.max_abs, max_abs)
        done(first.nbytes + second.nbytes)


def _piece(part: _Part, entry: TensorEntry, flat: Tensor) -> StatePiece:
    target, width = flat.view(torch.uint8).numpy(), flat.element_size()

    def write(at: int, values: Tensor) -> None:
        # numpy's copy: torch's would start a team of threads in each thread that reads.
        np.copyto(target[at * width : (at + values.numel()) * width], values.view(torch.uint8).numpy())

    return StatePiece(
        (entry.name,), entry.kind, entry.dtype, entry.shape, part.start, part.stop, lambda: flat, write
    )  # fmt: skip


def distance(first: Tensor, second: Tensor) -> tuple[int, float]:
    """Elements that differ, and the greatest |first - second|.

    Shape: both (n,). Of equal dtypes bits are compared, so that -0.0 differs from 0.0 by 0; else values, where NaN
    equals NaN. NaN against a number is infinitely far.
    """
    num_different, max_abs = 0, 0.0
    for start in range(0, len(first), _CACHED_NUMEL):
        a, b = first[start : start + _CACHED_NUMEL], second[start : start + _CACHED_NUMEL]
        differs = _bits(a) != _bits(b) if a.dtype == b.dtype else ~_same_values(a.double(), b.double())
        count = int(differs.sum())
        if count:
            num_different += count
            max_abs = max(max_abs, _gap(a.double(), b.double()))
    return num_different, max_abs


def _bits(values: Tensor) -> Tensor:
    return values.view(_BITS[values.element_size()])


def _same_values(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _gap(a: Tensor, b: Tensor) -> float:
    gap = (a - b).abs_()
    greatest = float(gap.max())
    if math.isnan(greatest):  # one that is no number, or the same infinity on both sides
        gap = gap.nan_to_num_(nan=torch.inf, posinf=torch.inf).masked_fill_(_same_values(a, b), 0)
        greatest = float(gap.max())
    return greatest


def _differs(pair: _Pair) -> bool:
    return bool(pair.num_different) or pair.a.dtype != pair.b.dtype


def _difference(pair: _Pair) -> Difference:
    what: What = "values" if pair.a.dtype == pair.b.dtype else "dtype"
    return Difference(
        pair.a.name, pair.a.kind, what, _shown(pair.a), _shown(pair.b), pair.a.numel, pair.num_different, pair.max_abs
    )


def _state_keys(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
