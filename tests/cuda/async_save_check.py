"""Saves in the background on a GPU, for machines that have one: not collected by pytest, which runs without.

    python tests/cuda/async_save_check.py [--device cpu] [--width 4096]
    torchrun --nproc-per-node 2 tests/cuda/async_save_check.py

The same state is saved at once and in the background while training goes on; the files must hold the same bits. Prints
one line a check, how long training stood still, and exits 1 if a check failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import raydz
from raydz.dist import init_world, shutdown_world
from tests.checkpoint.states import assert_same_bits, stored_tensors


def build_wide(stage: int, bf16: bool, width: int, device: str):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = torch.nn.Sequential(*layers, *([] if bf16 else [torch.nn.BatchNorm1d(width)]))  # its buffers change
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    return raydz.initialize(model, config, device=device)


def step(engine, width: int) -> float:
    started = time.perf_counter()
    engine.backward(engine(torch.randn(4, width, device=engine.world.device)).float().square().mean())
    engine.step()
    return time.perf_counter() - started


def check(stage: int, bf16: bool, width: int, device: str, root: Path) -> tuple[bool, str]:
    """Save, save behind training, compare."""
    engine = build_wide(stage, bf16, width, device)
    for _ in range(3):
        usual_s = step(engine, width)
    blocked = []
    for number in range(3):  # the first makes the image
        engine.save_checkpoint(root, f"sync-{number}")
        handle = engine.save_checkpoint(root, f"async-{number}", async_save=True)
        after_s = step(engine, width)
        step(engine, width)
        handle.result(120)
        blocked.append(handle.blocked_s)
    gigabytes, total_s = handle.num_bytes / 1e9, handle.total_s
    engine.comms.world.barrier()
    same = True
    if engine.world.rank == 0:
        for number in range(3):
            try:
                assert_same_bits(stored_tensors(root / f"async-{number}"), stored_tensors(root / f"sync-{number}"))
            except AssertionError as error:
                same = False
                print(error)
    engine.comms.world.barrier()
    engine.destroy()
    text = f"{gigabytes:.2f} GB, stood still {', '.join(f'{s * 1e3:.1f}' for s in blocked)} ms, total {total_s:.2f} s"
    return same, f"{text}; a step {usual_s * 1e3:.1f} ms, behind the snapshot {after_s * 1e3:.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    world = init_world(options.device)
    failed = 0
    shared = [tempfile.mkdtemp()]
    if world.world_size > 1:
        torch.distributed.broadcast_object_list(shared)
    for bf16 in (False, True):
        for stage in range(4):
            root = Path(shared[0], f"{stage}-{bf16}")
            same, text = check(stage, bf16, options.width, options.device, root)
            failed += not same
            if world.rank == 0:
                name = f"{world.world_size} x stage {stage}, {'bf16' if bf16 else 'fp32'}"
                print(f"{'ok  ' if same else 'FAIL'} {name}: {text}", flush=True)
    shutdown_world()
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
