"""The receipts of all ranks become one manifest; the fast look at a manifest sees what the slow one does."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydz.checkpoint import DataFile, Manifest, Piece, StatePiece, TensorEntry
from raydz.checkpoint.columns import Pieces, Sums
from raydz.checkpoint.data_file import FilePlan
from raydz.checkpoint.manifest import ITEM_BYTES
from raydz.checkpoint.receipts import build_manifest, decode_receipts, receipt_of
from raydz.errors import CheckpointError

KINDS = (("weight", "F32"), ("exp_avg", "F32"), ("buffer", "I64"))


def state_piece(name: str, kind: str, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> StatePiece:
    return StatePiece((name,), kind, dtype, shape, start, stop, lambda: torch.empty(0), lambda at, values: None)


@st.composite
def worlds(draw):
    """Tensors cut anywhere, each piece on any rank: (rank, name, kind, dtype, shape, start, stop)."""
    ranks, pieces = draw(st.integers(1, 5)), []
    for number in range(draw(st.integers(0, 4))):
        numel = draw(st.integers(1, 40))
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
        for kind, dtype in kinds:
            cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=5))})
            for start, stop in pairwise(cuts):
                pieces.append((draw(st.integers(0, ranks - 1)), f"n{number}", kind, dtype, (1, numel), start, stop))
    return ranks, pieces, draw(st.integers(0, 99))


@given(worlds())
@settings(deadline=None)
def test_every_piece_of_every_rank_is_in_the_manifest_once_and_by_position(world):
    ranks, pieces, seed = world
    random.Random(seed).shuffle(pieces)
    receipts, wanted, room = [], {}, 0
    for rank in range(ranks):
        own = [piece for piece in pieces if piece[0] == rank]
        offsets = [4096 + 512 * index for index in range(len(own))]
        plan = FilePlan(tuple(state_piece(*piece[1:]) for piece in own), tuple(offsets), b"", 1 << 20)
        receipts.append(json.dumps(receipt_of(plan, DataFile(f"{rank}.st", 1 << 20, 8, (rank, 2**32 - 1), 7))))
        for (_, name, kind, dtype, shape, start, stop), offset in zip(own, offsets, strict=True):
            found = wanted.setdefault((name, kind), (dtype, shape, []))
            found[2].append((start, stop, rank, offset))
            room = max(room, offset)
    manifest = build_manifest(decode_receipts(receipts), step=3, attempt="a", aliases={"b": "c"}, state={"d": 1})
    assert {key: (e.dtype, e.shape, [tuple(p) for p in e.pieces]) for key, e in manifest.tensors.items()} == {
        key: (dtype, shape, sorted(found)) for key, (dtype, shape, found) in wanted.items()
    }
    assert [(f.path, list(f.chunk_crcs)) for f in manifest.files] == [(f"{r}.st", [r, 2**32 - 1]) for r in range(ranks)]
    manifest.check_coverage("here")
    assert Manifest.from_bytes(manifest.to_bytes(), "here") == manifest


def is_whole(entries: list[TensorEntry], sizes: list[int]) -> bool:
    """Element by element."""
    for entry in entries:
        seen: list[int] = []
        for piece in entry.pieces:
            end = piece.offset + (piece.stop - piece.start) * ITEM_BYTES[entry.dtype]
            if not 0 <= piece.file < len(sizes) or piece.offset < 0 or end > sizes[piece.file]:
                return False
            if piece.stop <= piece.start:
                return False
            seen += range(piece.start, piece.stop)
        if seen != list(range(entry.numel)):
            return False
    return True


CUTS = st.sets(st.integers(0, 6), max_size=4).map(sorted)


def rows_of(cuts: list[int]) -> list[Piece]:
    """Elements 0 to the last cut, whole."""
    return [Piece(a, b, 0, 4 * a) for a, b in pairwise(sorted({0, *cuts}))]


CHANGE = st.tuples(st.integers(0, 3), st.sampled_from(Piece._fields), st.integers(-8, 8))


@given(cases=st.lists(st.tuples(CUTS, st.none() | CHANGE), max_size=4))
@settings(max_examples=200, deadline=None)
def test_a_fault_anywhere_is_found_and_nothing_else_is_one(cases):
    entries = []
    for index, (cuts, change) in enumerate(cases):
        rows = rows_of(cuts)
        numel = max((piece.stop for piece in rows), default=0)
        if change and rows:
            at, field, by = change[0] % len(rows), change[1], change[2]
            rows[at] = rows[at]._replace(**{field: getattr(rows[at], field) + by})
        entries.append(TensorEntry(f"t{index}", "weight", "F32", (numel,), tuple(rows)))
    files = (DataFile("a", 24, 8, (), 0), DataFile("b", 16, 8, (), 0))
    manifest = Manifest(1, 2, "a", 1.0, "9", files, {(e.name, e.kind): e for e in entries})
    if is_whole(entries, [24, 16]):
        manifest.check_coverage("here")
    else:
        with pytest.raises(CheckpointError):
            manifest.check_coverage("here")


@given(cuts=st.lists(st.integers(1, 29), unique=True), start=st.integers(0, 29), length=st.integers(1, 30))
@settings(deadline=None)
def test_overlapping_pieces_are_found_by_position(cuts, start, length):
    borders = sorted({0, 30, *cuts})
    pieces = [Piece(a, b, 0, a) for a, b in pairwise(borders)]
    wanted = [p for p in pieces if set(range(p.start, p.stop)) & set(range(start, start + length))]
    assert list(Pieces.of(pieces).overlapping(start, start + length)) == wanted


def test_columns_are_plain_integers_when_looked_at():
    pieces = Pieces.of([Piece(0, 5, 0, 8), Piece(5, 9, 1, 16)])
    assert pieces[-1] == Piece(5, 9, 1, 16) and list(pieces[:1]) == [Piece(0, 5, 0, 8)]
    assert all(type(number) is int for piece in pieces for number in piece)
    assert pieces == (Piece(0, 5, 0, 8), Piece(5, 9, 1, 16)) and pieces != pieces[:1]
    sums = Sums.from_bytes(b"\x01\0\0\0\xff\xff\xff\xff")
    assert (sums[0], sums[-1], len(sums), sums[:1]) == (1, 2**32 - 1, 2, (1,)) and sums == [1, 2**32 - 1]
    with pytest.raises(ValueError):
        Sums.from_bytes(b"\x01\0\0")
