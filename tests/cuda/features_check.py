"""What the CPU tests of the engine cannot show of a GPU: not collected by pytest.

    torchrun --nproc-per-node 2 tests/cuda/features_check.py

The self-check of a step, modules kept in fp32, and step time, peak memory and losses of each way to recompute, eager
and compiled. Prints one line a check and exits 1 if any failed. The oracle of the losses is the eager run.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from raydz.config import load_engine
from raydz.dist import init_world, shutdown_world
from raydz.engine import initialize
from raydz.models import Decoder, DecoderShape
from raydz.models.compiling import compile_blocks

ROWS, LENGTH, VOCABULARY = 4, 1024, 8192
# bf16 rounds at 2^-9; a compiled block rounds less often than an eager one, and four steps add that up.
LOSS_TOLERANCE = 0.02


def build(*, compiled: bool = False, bf16: bool = True, layers: int = 6, **parallel):
    with torch.device("meta"):
        model = Decoder(DecoderShape(VOCABULARY, 1024, layers, 16, 16, 2816))
    if compiled:
        compile_blocks(model)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "parallel": parallel,
    }
    return initialize(model, load_engine(config), device="cuda")


def batch(step: int, world) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + world.rank)
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator).to(world.device)


def loss_of(model, ids) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def check_verify(world) -> str:
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = build(bf16=False, layers=2)
    report = engine.verify_step(lambda model, _: loss_of(model, batch(0, world)))
    engine.destroy()
    return f"verify_step: largest difference {max(report.differences.values()):.1e}"


def check_fp32_modules(world) -> str:
    engine = build(layers=2, fp32_modules=["*norm*"])
    for step in range(3):
        engine.backward(loss_of(engine, batch(step, world)))
        report = engine.step()
    kinds = {
        dtype: sum(p.dtype == dtype for p in engine.module.parameters()) for dtype in (torch.float32, torch.bfloat16)
    }
    assert all((p.dtype == torch.float32) == ("norm" in name) for name, p in engine.module.named_parameters()), kinds
    assert not report.skipped
    engine.destroy()
    return f"fp32_modules: {kinds[torch.float32]} fp32 norms among {kinds[torch.bfloat16]} bf16 parameters, three steps"


def train(world, steps: int = 8, **options) -> tuple[list[float], float, float]:
    """Losses of four steps, median seconds of the later ones, peak GB."""
    engine = build(**options)
    losses, times = [], []
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        ids = batch(step, world)
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        losses.append(loss.item())
    engine.destroy()
    return losses[:4], statistics.median(times[4:]), torch.cuda.max_memory_allocated() / 1e9


def main() -> int:
    world = init_world("cuda")
    failed = 0

    def tell(passed: bool, text: str) -> None:
        nonlocal failed
        failed += not passed
        if world.rank == 0:
            print(f"{'ok  ' if passed else 'FAIL'} {world.world_size} x {text}", flush=True)

    for check in (check_verify, check_fp32_modules):
        try:
            tell(True, check(world))
        except Exception as error:
            tell(False, f"{check.__name__}: {type(error).__name__}: {error}")
    reference = None
    for compiled, mode in itertools.product((False, True), ("none", "selective", "full")):
        torch.compiler.reset()
        losses, seconds, peak = train(world, compiled=compiled, activation_checkpointing=mode)
        reference = reference or losses
        largest = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        kind = "compiled" if compiled else "eager"
        text = f"{kind:8} recompute {mode:9} {seconds * 1e3:7.1f} ms {peak:6.2f} GB, losses within {largest:.1e}"
        tell(largest < LOSS_TOLERANCE, text)
    shutdown_world()
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
