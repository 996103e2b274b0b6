"""What a checkpoint of a very large run costs besides its bytes: the real planner over a storage that only counts.

    python tests/bench/checkpoint_scale.py          # 70B on 1,024 ranks, loaded on 96; on 8, loaded on 1,000
    python tests/bench/checkpoint_scale.py --json   # one JSON line a result

Each rank's pieces are cut by the layout that ZeRO stage 3 uses, laid into a file, joined into a manifest, committed,
read back, and intersected with what ranks of the other world hold. Checksums are random numbers. Nothing is stored but
the manifest; times are of one core of this machine, and a store's latency comes on top (requests are counted).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from raydz.checkpoint import DataFile, Manifest, SaveRequest, StatePiece
from raydz.checkpoint.data_file import CHUNK_BYTES, plan_file
from raydz.checkpoint.load_plan import plan_load
from raydz.checkpoint.receipts import receipt_of
from raydz.checkpoint.writer import Part
from raydz.models import Decoder, DecoderShape
from raydz.storage import NotFound, ObjectInfo
from raydz.zero import GroupLayout, find_units

SHAPES = {
    "tiny": DecoderShape(512, 64, 4, 4, 4, 176),
    "8b": DecoderShape(128256, 4096, 32, 32, 8, 14336),
    "70b": DecoderShape(128256, 8192, 80, 64, 8, 28672),
}
CASES = ((1024, 96), (8, 1000))
KINDS = ("weight", "exp_avg", "exp_avg_sq")
PERSISTENT_NUMEL = 100_000
"""DeepSpeed's default below which a parameter stays gathered, in a group of its own."""


@dataclass
class CountingStore:
    """Remembers sizes, keeps the manifest, counts requests."""

    uri: str = "fake://scale"
    sizes: dict[str, int] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: int = 0

    def head(self, key: str) -> ObjectInfo | None:
        self.requests += 1
        return ObjectInfo(self.sizes[key], "etag") if key in self.sizes else None

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.requests += 1
        self.objects[key] = bytes(data)

    def get(self, key: str) -> bytes:
        self.requests += 1
        if key not in self.objects:
            raise NotFound("no such object", where=key)
        return self.objects[key]


def flat_groups(shape: DecoderShape) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The parameters of each flat group under stage 3."""
    with torch.device("meta"):
        model = Decoder(shape)
    groups = []
    for unit in find_units(model):
        members = [(spec.name, tuple(spec.parameter.shape)) for spec in unit.parameters]
        small = [member for member in members if np.prod(member[1]) < PERSISTENT_NUMEL]
        groups += [group for group in ([m for m in members if m not in small], small) if group]
    return groups


def layouts_of(groups: list[list[tuple[str, tuple[int, ...]]]], world_size: int) -> list[GroupLayout]:
    return [GroupLayout.of(members, world_size) for members in groups]


def pieces_of(layouts: list[GroupLayout], rank: int) -> Iterator[StatePiece]:
    """What `rank` saves or loads; nothing is behind it."""
    for layout in layouts:
        for part in layout.intervals(*layout.shard_range(rank)):
            for kind in KINDS:
                yield StatePiece((part.name,), kind, "F32", part.shape, part.start, part.stop, _no_data, _no_data)


def _no_data(*_: object) -> torch.Tensor:
    raise AssertionError("there are no bytes behind this piece")


def simulate_save(layouts: list[GroupLayout], world_size: int, store: CountingStore) -> dict[str, float]:
    """Plan every rank's file, join the receipts, commit."""
    generator = np.random.default_rng(0)
    request = SaveRequest(store, "step-0000000001", 1, [], {}, {"engine": {"global_steps": 1}})  # type: ignore[arg-type]
    receipts, plan_s, state_bytes = [], [], 0
    for rank in range(world_size):
        part = Part(request, "0123abcd", rank, world_size)
        started = time.process_time()
        plan = plan_file(list(pieces_of(layouts, rank)))
        plan_s.append(time.process_time() - started)
        count = -(-plan.total_bytes // CHUNK_BYTES)
        sums = tuple(generator.integers(0, 2**32, count, np.uint32).tolist())
        file = DataFile(part.path, plan.total_bytes, CHUNK_BYTES, sums, 7, "crc32c")
        receipts.append(json.dumps(receipt_of(plan, file)))
        store.sizes[part.key] = plan.total_bytes
        state_bytes += plan.total_bytes
    started = time.process_time()
    outcome = Part(request, "0123abcd", 0, world_size).decide([json.loads(receipt) for receipt in receipts])
    commit_s = time.process_time() - started
    assert "error" not in outcome, outcome
    return {
        "state_bytes": state_bytes,
        "plan_file_s": statistics.median(plan_s),
        "receipts_bytes": sum(map(len, receipts)),
        "commit_s": commit_s,
        "commit_requests": store.requests,
        "manifest_bytes": len(store.objects["step-0000000001/manifest.json"]),
    }


def simulate_load(layouts: list[GroupLayout], world_size: int, store: CountingStore, samples: int) -> dict[str, float]:
    """Open the manifest as a rank does, and plan the loads of some ranks spread over the world."""
    data = store.get("step-0000000001/manifest.json")
    started = time.process_time()
    manifest = Manifest.from_bytes(data, "fake")
    open_s = time.process_time() - started
    plan_s, reads, heads, over, needed, read = [], [], [], [], 0, 0
    for rank in np.linspace(0, world_size - 1, min(samples, world_size)).astype(int):
        started = time.process_time()
        plan = plan_load(manifest, pieces_of(layouts, int(rank)), "fake")
        runs = plan.runs(manifest.files)
        plan_s.append(time.process_time() - started)
        assert not plan.missing
        reads.append(len(runs))
        heads.append(len({run.file for run in runs}))
        read += sum(run.bytes for run in runs)
        needed += plan.needed_bytes
        over.append(sum(run.bytes for run in runs) / plan.needed_bytes)
    return {
        "open_manifest_s": open_s,
        "plan_load_s": max(plan_s),
        "reads_per_rank": statistics.median(reads),
        "heads_per_rank": statistics.median(heads),
        "read_per_needed": read / needed,
        "read_per_needed_max": max(over),
    }


def simulate(shape: str, saved: int, loaded: int, samples: int) -> dict[str, float]:
    groups, store = flat_groups(SHAPES[shape]), CountingStore()
    figures = simulate_save(layouts_of(groups, saved), saved, store)
    return figures | simulate_load(layouts_of(groups, loaded), loaded, store, samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="70b")
    parser.add_argument("--ranks", type=int, help="only the case that saves on so many ranks")
    parser.add_argument("--samples", type=int, default=32, help="loading ranks that are planned")
    parser.add_argument("--quick", action="store_true", help="the 8B shape")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape = "8b" if options.quick else options.shape
    for saved, loaded in CASES:
        if options.ranks not in (None, saved):
            continue
        figures = simulate(shape, saved, loaded, options.samples)
        if options.json:
            row = {"bench": "checkpoint_scale", "system": "raydz", "variant": f"{shape}, {saved} -> {loaded}"}
            print(json.dumps({**row, "device": "cpu", "ranks": saved, "metrics": figures, "note": "simulated"}))
            continue
        print(f"{shape}, saved on {saved} ranks, loaded on {loaded}")
        for name, value in figures.items():
            print(f"    {name:22} {value:>18,.4g}" if value < 100 else f"    {name:22} {value:>18,.0f}")


if __name__ == "__main__":
    main()
