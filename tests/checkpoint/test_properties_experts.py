"""Experts over any expert-parallel layout: saved on one (world, ep, stage), loaded on another, bit for bit.

A tensor of experts has its first dimension over all experts, by global number. `ep` ranks that follow each other hold
different experts, an equal block each; the ranks that hold the same block share it as ZeRO does. Dense tensors beside
them are shared by all ranks. The oracle is the tensors themselves.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydz.checkpoint import StatePiece, data_file
from raydz.storage import open_store
from raydz.zero import GroupLayout
from tests.checkpoint.test_properties import (
    CHUNK,
    DTYPES,
    Layout,
    bits,
    chunks_needed,
    data_width,
    load_rank,
    piece_of,
    random_tensors,
    save_all,
)

NUM_EXPERTS = 12


@dataclass(frozen=True)
class ExpertLayout:
    """Stage, world size, and how many ranks hold different experts; tensors named `experts.` are cut by these first."""

    stage: int
    world_size: int
    ep: int

    def pieces(self, tensors: dict[str, torch.Tensor], rank: int, *, saving: bool) -> list[StatePiece]:
        dense = {name: tensor for name, tensor in tensors.items() if not name.startswith("experts.")}
        found = Layout(self.stage, self.world_size).pieces(dense, rank, saving=saving)
        ep_rank, place = rank % self.ep, rank // self.ep
        for dtype in DTYPES:
            stacked = {name: t for name, t in tensors.items() if name not in dense and t.dtype == dtype}
            shapes = [(name, (t.numel() // self.ep,)) for name, t in stacked.items()]
            layout = GroupLayout.of(shapes, self.world_size // self.ep)
            is_part = saving or self.stage > 0
            bounds = layout.shard_range(place) if is_part else (0, layout.padded_numel)
            for part in layout.intervals(*bounds):
                whole = stacked[part.name]
                first = ep_rank * (whole.numel() // self.ep)
                start, stop = first + part.start, first + part.stop
                piece = piece_of(part, whole[start:stop])
                found.append(replace(piece, start=start, stop=stop, shape=(whole.numel(),)))
        return found


def layouts(largest: int):
    """Any stage, any world, any ep that divides both the ranks and the experts."""
    return st.tuples(st.integers(0, 3), st.integers(1, largest)).flatmap(
        lambda drawn: st.sampled_from(
            [ExpertLayout(*drawn, ep) for ep in range(1, drawn[1] + 1) if math.gcd(drawn[1], NUM_EXPERTS) % ep == 0]
        )
    )


def tensors_of(each: list[int], kinds: list[int], dense: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Stacked experts of so many elements each, and dense tensors."""
    numels = [NUM_EXPERTS * numel for numel in each] + dense
    made = random_tensors(numels, [kinds[i % len(kinds)] for i in range(len(numels))], seed)
    names = [f"experts.{i}.w" for i in range(len(each))] + [f"dense.{i}.w" for i in range(len(dense))]
    return dict(zip(names, made.values(), strict=True))


def check(before: ExpertLayout, after: ExpertLayout, tensors: dict[str, torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        manifest = save_all(store, before, tensors)  # type: ignore[arg-type]
        joined = {name: torch.zeros_like(t.view(torch.uint8)).view(t.dtype) for name, t in tensors.items()}
        for rank in range(after.world_size):
            loaded, num_bytes, pieces, _ = load_rank(store, manifest, after, tensors, rank)  # type: ignore[arg-type]
            assert num_bytes == chunks_needed(manifest, pieces)
            for piece in pieces:
                joined[piece.name][piece.start : piece.stop] = loaded[piece.name][piece.start : piece.stop]
        for name, tensor in tensors.items():
            assert bits(joined[name]) == bits(tensor)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(data_file, "CHUNK_BYTES", CHUNK)


CASE = {
    "before": layouts(8),
    "after": layouts(8),
    "each": st.lists(st.integers(0, 20), min_size=1, max_size=3),
    "kinds": st.lists(st.integers(0, len(DTYPES) - 1), min_size=1, max_size=3),
    "dense": st.lists(st.integers(0, 60), max_size=2),
    "seed": st.integers(0, 99),
}
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@given(**CASE)
@settings(max_examples=40, **QUIET)
def test_experts_saved_by_one_layout_load_in_any_other(before, after, each, kinds, dense, seed):
    check(before, after, tensors_of(each, kinds, dense, seed))


@pytest.mark.slow
@given(**CASE)
@settings(max_examples=1000, **QUIET)
def test_experts_saved_by_one_layout_load_in_any_other_many_times(before, after, each, kinds, dense, seed):
    check(before, after, tensors_of(each, kinds, dense, seed))


@given(before=layouts(6), after=layouts(6), each=st.lists(st.integers(4000, 6000), min_size=1, max_size=2))
@settings(max_examples=15, **QUIET)
def test_bytes_read_are_at_most_a_tenth_more_than_needed(before, after, each):
    """A rank's share is 32 KB or more, over six files at most: eighty chunks of each."""
    tensors = tensors_of(each, [0], [], 1)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        manifest = save_all(store, before, tensors)  # type: ignore[arg-type]
        for rank in range(after.world_size):
            _, num_bytes, pieces, _ = load_rank(store, manifest, after, tensors, rank)  # type: ignore[arg-type]
            assert num_bytes <= 1.1 * sum((p.stop - p.start) * data_width(p) for p in pieces)


def test_a_rank_of_another_ep_reads_its_own_experts_alone():
    """Four ranks, each with a quarter of the experts, load what two ranks without expert parallelism saved."""
    tensors = tensors_of([4096], [0], [], 3)
    before, after = ExpertLayout(3, 2, 1), ExpertLayout(3, 4, 4)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        manifest = save_all(store, before, tensors)  # type: ignore[arg-type]
        for rank in range(4):
            _, num_bytes, pieces, _ = load_rank(store, manifest, after, tensors, rank)  # type: ignore[arg-type]
            [piece] = pieces
            assert (piece.start, piece.stop) == (rank * 3 * 4096, (rank + 1) * 3 * 4096), "three experts of twelve"
            assert num_bytes <= 4 * 3 * 4096 + 2 * CHUNK
