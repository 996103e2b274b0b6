"""Integers by the hundred thousand without a Python object each: the stored pieces of tensors, and checksums.

Neighbours: `manifest.py` has them in its entries, `receipts.py` joins those of all ranks, `encoding.py` packs them.
Reading one gives plain integers and `Piece`s.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt


class Piece(NamedTuple):
    """Elements [start, stop) of the flattened tensor, at byte `offset` of file number `file`."""

    start: int
    stop: int
    file: int
    offset: int


class Pieces(Sequence[Piece]):
    """The pieces of one tensor, by position.

    Args:
        columns: starts, stops, files and offsets, shape (4, n), int64; may be a view of other tensors' as well.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: npt.NDArray[np.int64]) -> None:
        self.columns = columns

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Pieces:
        """From one object a piece, or what is in this form already."""
        if isinstance(pieces, Pieces):
            return pieces
        rows = np.array(list(pieces), np.int64).reshape(-1, len(Piece._fields))
        return cls(np.ascontiguousarray(rows.T))

    def __len__(self) -> int:
        return self.columns.shape[1]

    @overload
    def __getitem__(self, index: int) -> Piece: ...

    @overload
    def __getitem__(self, index: slice) -> Pieces: ...

    def __getitem__(self, index: int | slice) -> Piece | Pieces:
        found = self.columns[:, index]
        return Pieces(found) if isinstance(index, slice) else Piece(*found.tolist())

    def __iter__(self) -> Iterator[Piece]:
        return map(Piece._make, self.columns.T.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Pieces):
            return np.array_equal(self.columns, other.columns)
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Pieces({list(self)!r})"

    def overlapping(self, start: int, stop: int) -> Iterator[Piece]:
        """Those with an element in [start, stop), by position; pieces must not overlap each other."""
        first = int(self.columns[1].searchsorted(start, side="right"))
        last = int(self.columns[0].searchsorted(stop, side="left"))
        return iter(self[first:last])


class Sums(Sequence[int]):
    """Checksums of 32 bits."""

    __slots__ = ("packed",)

    def __init__(self, values: Iterable[int]) -> None:
        self.packed = array("I", values)

    @classmethod
    def of(cls, values: Iterable[int]) -> Sums:
        """From integers, or what is in this form already."""
        return values if isinstance(values, Sums) else cls(values)

    @classmethod
    def from_bytes(cls, data: bytes) -> Sums:
        """From 4 bytes each, little endian.

        Raises:
            ValueError: there are bytes left over.
        """
        sums = cls(())
        sums.packed.frombytes(np.frombuffer(data, "<u4").astype(np.uint32).tobytes())
        return sums

    def to_bytes(self) -> bytes:
        """What `from_bytes` takes."""
        return np.frombuffer(self.packed, np.uint32).astype("<u4").tobytes()

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: Any) -> Any:
        return self.packed[index] if isinstance(index, int) else tuple(self.packed[index])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sums):
            return self.packed == other.packed
        return isinstance(other, Sequence) and list(self.packed) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Sums({self.packed.tolist()!r})"


def join_columns(pieces: Sequence[Pieces]) -> npt.NDArray[np.int64]:
    """The columns of all, one behind the other."""
    if not pieces:
        return np.zeros((len(Piece._fields), 0), np.int64)
    return np.concatenate([each.columns for each in pieces], axis=1)
