"""ZeRO++ on GPUs, for machines that have some: not collected by pytest, which runs without.

    python tests/cuda/zeropp_check.py
    torchrun --nproc-per-node 2 tests/cuda/zeropp_check.py

Prints one line a check and exits 1 if any failed. hpZ needs at least four GPUs. Int8 blocks are set beside the CPU's.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from raydz.dist import init_world, shutdown_world
from raydz.ops.quantise import pack_int8, packed_bytes, sum_packed, unpack_int8
from tests.zero.test_zeropp import GRADIENTS, NEAR, WEIGHTS, decoder_losses

TOLERANCE = 0.03  # nats, as on the CPU
NUMEL = 1 << 28


def same_bits_as_the_cpu(dtype: torch.dtype, numel: int, magnitude: float) -> bool:
    """Packed bytes, what they unpack to, and their sums; the rows hold every kind of trouble."""
    rows = torch.randn(3, numel) * torch.exp(8 * torch.randn(3, 1)) * magnitude
    rows[0, 5 % numel], rows[1, 300 % numel], rows[2, -1], rows[2, 512:768] = torch.inf, torch.nan, -torch.inf, 0
    rows[0, numel // 2] = torch.finfo(dtype).max
    rows, start = rows.to(dtype), torch.randn(numel)
    found = []
    for device in ("cpu", "cuda"):
        there = rows.to(device)
        packed = torch.zeros(3, packed_bytes(numel), dtype=torch.uint8, device=device)
        pack_int8(there, packed)
        back, total, added = torch.empty_like(there), torch.empty(numel, device=device), start.clone().to(device)
        unpack_int8(packed, back)
        sum_packed(packed, total)
        sum_packed(packed, added, accumulate=True)
        found.append([t.cpu() for t in (packed, back, total, added)])
    return all(bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(*found, strict=True))


def speed() -> str:
    rows = torch.randn(2, NUMEL // 2, device="cuda", dtype=torch.bfloat16)
    packed = torch.empty(2, packed_bytes(NUMEL // 2), dtype=torch.uint8, device="cuda")
    out = torch.empty(NUMEL // 2, device="cuda")
    figures = []
    for name, call in {
        "pack": lambda: pack_int8(rows, packed),
        "unpack": lambda: unpack_int8(packed, rows),
        "sum of 2": lambda: sum_packed(packed, out),
    }.items():
        call()
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        figures.append(f"{name} {(time.perf_counter() - started) / NUMEL * 1e12:.1f}")
    return ", ".join(figures) + " ps an element"


def main() -> int:
    world = init_world("cuda")
    failed = 0

    def tell(passed: bool, text: str) -> None:
        nonlocal failed
        failed += not passed
        if world.rank == 0:
            print(f"{'ok  ' if passed else 'FAIL'} {world.world_size} x {text}", flush=True)

    if world.rank == 0:
        torch.manual_seed(0)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            cases = [(n, size) for n in (1, 16, 255, 256, 257, 4096, 100_000, 3_000_001) for size in (1.0, 1e-40)]
            passed = all(same_bits_as_the_cpu(dtype, numel, size) for numel, size in cases)
            tell(passed, f"int8 blocks have the CPU's bits, {dtype}, {len(cases)} lengths and magnitudes")
        print(f"     {speed()}", flush=True)
    if world.world_size > 1:
        for bf16 in (False, True):
            exact = decoder_losses(world.rank, world.world_size, {}, bf16, "cuda")
            for zero in (WEIGHTS, GRADIENTS, WEIGHTS | GRADIENTS):
                found = decoder_losses(world.rank, world.world_size, zero, bf16, "cuda")
                worst = max(abs(a - b) for a, b in zip(found, exact, strict=True))
                tell(0 < worst < TOLERANCE, f"30 steps, bf16={bf16}, {', '.join(zero)}: losses within {worst:.4f}")
            if world.world_size % 2 == 0 and world.world_size > 2:
                found = decoder_losses(world.rank, world.world_size, NEAR, bf16, "cuda")
                tell(found == exact, f"30 steps, bf16={bf16}, a second copy changes no loss")
    shutdown_world()
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
