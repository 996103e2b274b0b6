"""Random tensors, stages and world sizes: saved by one, loaded by another, bit for bit, for hardly more than is needed.

Ranks are simulated one after the other: neither planner nor reader talks to others. The oracle is the tensors
themselves, and a count of chunks from the pieces' own places.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydz.checkpoint import Manifest, StatePiece, data_file
from raydz.checkpoint.data_file import plan_file, write_file
from raydz.checkpoint.load_plan import plan_load
from raydz.checkpoint.pieces import DTYPE_NAMES
from raydz.checkpoint.reader import CheckpointReader
from raydz.checkpoint.receipts import build_manifest, receipt_of
from raydz.storage import open_store
from raydz.zero import GroupLayout

CHUNK = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@dataclass(frozen=True)
class Layout:
    """Stage and world size of a save or a load."""

    stage: int
    world_size: int

    def pieces(self, tensors: dict[str, torch.Tensor], rank: int, *, saving: bool) -> list[StatePiece]:
        """A rank's pieces of flat tensors, which the stage shards or not; saving, each element is some rank's."""
        found = []
        for dtype in DTYPES:
            shapes = [(name, (t.numel(),)) for name, t in tensors.items() if t.dtype == dtype]
            layout = GroupLayout.of(shapes, self.world_size)
            is_part = saving or self.stage > 0
            bounds = layout.shard_range(rank) if is_part else (0, layout.padded_numel)
            for part in layout.intervals(*bounds):
                live = tensors[part.name][part.start : part.stop]
                found.append(piece_of(part, live))
        return found


def piece_of(part, live: torch.Tensor) -> StatePiece:
    def write(at: int, values: torch.Tensor) -> None:
        live[at : at + values.numel()].copy_(values)

    dtype = DTYPE_NAMES[live.dtype]
    return StatePiece((part.name,), "weight", dtype, part.shape, part.start, part.stop, lambda: live, write)


def random_tensors(numels: list[int], kinds: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Random bits, NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, (numel, kind) in enumerate(zip(numels, kinds, strict=True)):
        dtype = DTYPES[kind]
        data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensors[f"layer.{index}.w"] = data.view(dtype)
    return tensors


def save_all(store, layout: Layout, tensors: dict[str, torch.Tensor]) -> Manifest:
    """Every rank's file, one after the other, and the manifest as a reader sees it."""
    receipts = []
    for rank in range(layout.world_size):
        plan = plan_file(layout.pieces(tensors, rank, saving=True))
        with store.writer(f"one/{rank}") as out:
            receipts.append(receipt_of(plan, write_file(plan, out, str(rank))))
    manifest = build_manifest(receipts, step=1, attempt="a", aliases={}, state={})
    return Manifest.from_bytes(manifest.to_bytes(), "here")


def load_rank(store, manifest: Manifest, layout: Layout, numels: dict[str, torch.Tensor], rank: int):
    """Load a rank's pieces into zeros: tensors, bytes read, pieces."""
    blank = {name: torch.zeros_like(t.view(torch.uint8)).view(t.dtype) for name, t in numels.items()}
    pieces = layout.pieces(blank, rank, saving=False)
    plan = plan_load(manifest, pieces, "here")
    assert not plan.missing
    reader = CheckpointReader(store, "one", manifest)
    runs = plan.runs(manifest.files)
    reader.check_there(run.file for run in runs)
    reader.fill(runs)
    return blank, reader.bytes_read, pieces, sum(map(len, plan.needs.values()))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def chunks_needed(manifest: Manifest, pieces: list[StatePiece]) -> int:
    """Bytes of all chunks in which an element of the pieces lies, element by element."""
    touched = set()
    for piece in pieces:
        entry = manifest.tensors[piece.name, piece.kind]
        width = data_width(piece)
        for stored in entry.pieces:
            for element in range(max(piece.start, stored.start), min(piece.stop, stored.stop)):
                touched.add((stored.file, (stored.offset + (element - stored.start) * width) // CHUNK))
    return sum(min(CHUNK, manifest.files[file].bytes - chunk * CHUNK) for file, chunk in touched)


def data_width(piece: StatePiece) -> int:
    return piece.read().element_size()


def check(case: dict) -> None:
    tensors = random_tensors(case["numels"], case["kinds"], case["seed"])
    before, after = (Layout(case["stages"][i], case["worlds"][i]) for i in (0, 1))
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        manifest = save_all(store, before, tensors)
        joined = {name: torch.zeros_like(t.view(torch.uint8)).view(t.dtype) for name, t in tensors.items()}
        for rank in range(after.world_size):
            loaded, num_bytes, pieces, num_ranges = load_rank(store, manifest, after, tensors, rank)
            needed = sum((p.stop - p.start) * data_width(p) for p in pieces)
            assert num_bytes == chunks_needed(manifest, pieces)
            assert needed <= num_bytes <= needed + num_ranges * 2 * (CHUNK - 1)
            for piece in pieces:
                place = slice(piece.start, piece.stop)
                assert bits(loaded[piece.name][place]) == bits(tensors[piece.name][place])
                joined[piece.name][place] = loaded[piece.name][place]
        for name, tensor in tensors.items():
            assert bits(joined[name]) == bits(tensor)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(data_file, "CHUNK_BYTES", CHUNK)


CASES = st.integers(1, 6).flatmap(
    lambda count: st.fixed_dictionaries(
        {
            "numels": st.lists(st.integers(0, 300), min_size=count, max_size=count),
            "kinds": st.lists(st.integers(0, len(DTYPES) - 1), min_size=count, max_size=count),
            "stages": st.tuples(st.integers(0, 3), st.integers(0, 3)),
            "worlds": st.tuples(st.integers(1, 6), st.integers(1, 6)),
            "seed": st.integers(0, 99),
        }
    )
)


@given(case=CASES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_layout_loads_what_any_other_saved(case):
    check(case)


@pytest.mark.slow
@given(case=CASES)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_layout_loads_what_any_other_saved_many_times(case):
    check(case)


@given(
    worlds=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    stages=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    numels=st.lists(st.integers(3000, 9000), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_read_are_at_most_a_tenth_more_than_needed(worlds, stages, numels, seed):
    """Where a rank's share of a file is forty chunks or more, which at the real 256 KiB is 10 MiB."""
    tensors = random_tensors(numels, [0] * len(numels), seed)
    before, after = (Layout(stages[i], worlds[i]) for i in (0, 1))
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        manifest = save_all(store, before, tensors)
        for rank in range(after.world_size):
            _, num_bytes, pieces, _ = load_rank(store, manifest, after, tensors, rank)
            needed = sum((p.stop - p.start) * data_width(p) for p in pieces)
            files = {s.file for p in pieces for s in manifest.tensors[p.name, p.kind].pieces
                     if max(s.start, p.start) < min(s.stop, p.stop)}  # fmt: skip
            if needed >= 40 * CHUNK * len(files):
                assert num_bytes <= 1.1 * needed
