"""Getting a rank's state back: from its snapshot in memory, from a vault's copy of it, from a folder, from S3.

    python tests/bench/memory_snapshots.py [--size 20m] [--rounds 5] [--json]

One process, a decoder's fp32 weights and AdamW's two moments. `keep` is the whole snapshot or save, `blocked` what
training waits for it, `back` the load into an engine; best of the rounds, with the CPU seconds of the same round, which
a busy machine changes less. S3 is SeaweedFS on this machine. `vault` copies through memory as a supervisor does, but
in one process: what Ray's transport between hosts adds is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from step import SIZES  # noqa: E402 - the folder of this file is no package

from raydz.checkpoint.memory import MemorySnapshots  # noqa: E402
from raydz.config import load_engine  # noqa: E402
from raydz.engine import initialize  # noqa: E402
from raydz.models import Decoder, DecoderShape  # noqa: E402
from raydz.orchestrate.vault import Vault, moment_of  # noqa: E402
from raydz.storage import S3Options  # noqa: E402
from raydz.storage.memory_slot import MemorySlot, new_memory  # noqa: E402
from tests.support.seaweed import SeaweedServer  # noqa: E402

Timed = tuple[float, float]


def timed(work: Callable[[], object]) -> Timed:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def through_vault(slot: MemorySlot) -> None:
    """To a vault on another node and back into the slot."""
    vault, key, record = Vault(), (1, 0), slot.record()
    assert record is not None
    with slot.map() as image:
        for start in range(0, len(image), 64 << 20):
            part = np.frombuffer(image[start : start + (64 << 20)], np.uint8)
            vault.put_part(key, moment_of(record), len(image), start, part)
    vault.commit(key, record)
    found = np.empty(record["bytes"], np.uint8)
    for start in range(0, len(found), 64 << 20):
        part = vault.get_part(key, moment_of(record), start, start + (64 << 20))
        found[start : start + len(part)] = part
    slot.put(record, found.data)


def measure(size: str, rounds: int, s3: str, options: S3Options) -> list[dict]:
    hidden, layers, heads, intermediate, vocabulary = SIZES[size]
    with torch.device("meta"):
        model = Decoder(DecoderShape(vocabulary, hidden, layers, heads, heads, intermediate))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    engine = initialize(model, load_engine(config), device="cpu")
    engine.backward(engine(torch.zeros(1, 8, dtype=torch.long)).float().square().mean())
    engine.step()
    slots = [MemorySlot(new_memory(f"bench-{index}")) for index in range(2)]
    snapshots = MemorySnapshots(slots, 0, 1, torch.device("cpu"))
    rows: dict[str, dict[str, list]] = {
        name: {"keep": [], "blocked": [], "back": []} for name in ("memory", "vault", "file", "s3")
    }
    with tempfile.TemporaryDirectory() as folder:
        for step in range(rounds + 1):  # the first one meets new memory
            measure_memory(engine, snapshots, slots, step, rows)
            for name, where, how in (("file", folder, None), ("s3", s3, options)):
                save = partial(engine.save_checkpoint, where, f"tag-{step}", options=how)
                load = partial(engine.load_checkpoint, where, f"tag-{step}", options=how)
                rows[name]["keep"].append(timed(save))
                rows[name]["back"].append(timed(load))
    num_bytes = slots[0].image_bytes()
    return [
        {"where": name, "bytes": num_bytes, **{what: min(found) for what, found in times.items() if found}}
        for name, times in rows.items()
    ]


def measure_memory(engine, snapshots: MemorySnapshots, slots: list[MemorySlot], step: int, rows: dict) -> None:
    def keep() -> None:
        engine.snapshot(snapshots, step=step, state={})
        snapshots.wait()

    def back() -> None:
        engine.restore(snapshots, snapshots.usable(engine.held_pieces())[-1])

    rows["memory"]["keep"].append(timed(keep))
    rows["memory"]["blocked"].append((engine.take_save_blocked_s(), 0.0))
    rows["memory"]["back"].append(timed(back))
    newest = max(slots, key=lambda slot: moment_of(slot.record()))
    rows["vault"]["back"].append(timed(partial(through_vault, newest)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="20m", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    server = SeaweedServer()
    try:
        os.environ.update(server.env)
        rows = measure(options.size, options.rounds, f"s3://{server.bucket()}/bench", S3Options(server.endpoint_url))
    finally:
        server.stop()
    for row in rows:
        if options.json:
            print(json.dumps(row))
            continue
        kinds = [what for what in ("keep", "blocked", "back") if what in row]
        cells = [f"{what} {row[what][0]:.3f} s (cpu {row[what][1]:.3f})" for what in kinds]
        print(f"{row['where']:>7}  {row['bytes'] / 1e9:.2f} GB  " + "  ".join(cells))


if __name__ == "__main__":
    main()
