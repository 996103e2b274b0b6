"""Joining very many pieces does not set off Python's search for cycles."""

from __future__ import annotations

import gc
import json

import pytest

from raydz.checkpoint.encoding import pack_column
from raydz.checkpoint.garbage import collection_paused
from raydz.checkpoint.receipts import build_manifest, decode_receipts


def test_collection_goes_on_afterwards_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collection_paused():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_receipts_of_a_thousand_ranks_are_joined_without_one_collection() -> None:
    file = {"path": "x", "bytes": 8, "chunk_bytes": 8, "chunk_crcs": [1], "crc": 1, "algorithm": "crc32"}
    names = [[f"w{n}", [1024]] for n in range(20)]
    receipts = [
        json.dumps({"file": file, "names": names, "kinds": [["weight", "F32"]], "count": 20,
                    "pieces": pack_column([range(20), [0] * 20, [r] * 20, [r + 1] * 20, [0] * 20])})
        for r in range(1024)
    ]  # fmt: skip
    inside: list[str] = []

    def note(phase: str, info: dict) -> None:
        if phase == "start" and not gc.isenabled():
            inside.append(phase)

    counts = [stage["collections"] for stage in gc.get_stats()]
    gc.callbacks.append(note)
    try:
        manifest = build_manifest(decode_receipts(receipts), step=1, attempt="a", aliases={}, state={})
        manifest.to_bytes()
    finally:
        gc.callbacks.remove(note)
    made = sum(stage["collections"] for stage in gc.get_stats()) - sum(counts)
    assert not inside and made <= 6, "each of the three stages may be followed by one"
    entry = manifest.tensors["w7", "weight"]
    assert [piece.file for piece in entry.pieces] == list(range(1024)) and entry.shape == (1024,)
