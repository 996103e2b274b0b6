"""What a rank tells rank 0 of its data file, and how rank 0 makes one manifest of all of them.

Neighbours: `writer.py` writes and commits; `exchange.py` carries receipts. At 1,024 ranks there are 150,000 pieces and
more, so they travel as columns and are joined as arrays. See the notes "Receipts" and "Scale" in README.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raydz.checkpoint.columns import Pieces
from raydz.checkpoint.data_file import FilePlan
from raydz.checkpoint.encoding import pack_column, unpack_columns
from raydz.checkpoint.garbage import collection_paused
from raydz.checkpoint.manifest import DataFile, Manifest, TensorEntry
from raydz.version import __version__

_COLUMNS = 5  # number of the name, number of the kind, start, stop, offset
_FAST = 1  # zlib's level: a receipt lives for a second


def receipt_of(plan: FilePlan, data_file: DataFile) -> dict[str, Any]:
    """What rank 0 needs to know of a data file, as JSON values.

    `names` are [name, shape] and `kinds` [kind, dtype], each once; `pieces` five packed columns, `count` of each.
    """
    names: dict[tuple[str, tuple[int, ...]], int] = {}
    kinds: dict[tuple[str, str], int] = {}
    rows = [
        (
            names.setdefault((piece.name, tuple(piece.shape)), len(names)),
            kinds.setdefault((piece.kind, piece.dtype), len(kinds)),
            piece.start,
            piece.stop,
            offset,
        )
        for piece, offset in zip(plan.pieces, plan.offsets, strict=True)
    ]
    table = np.array(rows, np.int64).reshape(-1, _COLUMNS).T
    return {
        "file": data_file.as_json(),
        "names": [[name, list(shape)] for name, shape in names],
        "kinds": [list(kind) for kind in kinds],
        "count": len(rows),
        "pieces": pack_column(table, _FAST),
    }


def decode_receipts(texts: Sequence[bytes | str]) -> list[dict[str, Any]]:
    """What the ranks wrote of their files, as they sent it."""
    with collection_paused():
        return [json.loads(text) for text in texts]


@collection_paused()
def build_manifest(
    receipts: Sequence[Mapping[str, Any]], *, step: int, attempt: str, aliases: Mapping[str, str],
    state: Mapping[str, Any],
) -> Manifest:  # fmt: skip
    """Join the receipts, which are in the order of the ranks."""
    return Manifest(
        step=step, world_size=len(receipts), attempt=attempt, created=time.time(), raydz_version=__version__,
        files=tuple(DataFile.from_json(receipt["file"], "a receipt") for receipt in receipts),
        tensors=_join(receipts), aliases=dict(aliases), state=dict(state),
    )  # fmt: skip


class _Numbers:
    """Numbers for what occurs in receipts, each once over all ranks."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.values: list[Any] = []

    def of(self, key: Any, value: Any) -> int:
        number = self.known.setdefault(key, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number

    def places(self, by: Any) -> npt.NDArray[np.int64]:
        """Place of each number among the distinct `by(value)`, sorted."""
        keys = [by(value) for value in self.values]
        place = {key: index for index, key in enumerate(sorted(set(keys)))}
        return np.array([place[key] for key in keys], np.int64)


def _join(receipts: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], TensorEntry]:
    """Entries by (name, kind), sorted, their pieces by position."""
    names, kinds = _Numbers(), _Numbers()
    tables = []
    for receipt in receipts:
        table = unpack_columns(receipt["pieces"], _COLUMNS, receipt["count"], "a receipt")
        for row, numbers in ((0, [names.of(each[0], each) for each in receipt["names"]]),
                             (1, [kinds.of(tuple(each), each) for each in receipt["kinds"]])):  # fmt: skip
            if table.size:
                table[row] = np.array(numbers, np.int64)[table[row]]
        tables.append(table)
    if not names.values:
        return {}
    files = np.repeat(np.arange(len(tables)), [table.shape[1] for table in tables])
    name, kind, start, stop, offset = np.concatenate(tables, axis=1)
    key = names.places(lambda each: each[0])[name] * len(kinds.values) + kinds.places(lambda each: each[0])[kind]
    order = np.lexsort((start, key))
    columns = np.stack([start, stop, files, offset])[:, order]
    key, name, kind = key[order], name[order], kind[order]
    bounds = np.flatnonzero(np.diff(key, prepend=-1))
    entries = {}
    for first, last in zip(bounds.tolist(), [*bounds[1:].tolist(), len(key)], strict=True):
        (own, shape), (its_kind, dtype) = names.values[name[first]], kinds.values[kind[first]]
        entries[own, its_kind] = TensorEntry(own, its_kind, dtype, tuple(shape), Pieces(columns[:, first:last]))
    return entries
