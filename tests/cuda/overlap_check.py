"""How much of the communication of a step lies behind computation, from a profile of the GPU: not collected by pytest.

    torchrun --nproc-per-node 2 tests/cuda/overlap_check.py --layers 8 --hidden 2048

For each stage prints, of one step on rank 0: its length, the time in which a collective's kernel ran, the part of it
in which no other kernel did (exposed), and on how many streams the collectives ran. Exits 1 if gathers and reductions
shared a stream, or if at stage 3 more than --most of the communication was exposed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))

from raydz.config import load_engine
from raydz.dist import init_world, shutdown_world
from raydz.engine import initialize
from raydz.models import Decoder, DecoderShape

Interval = tuple[float, float]


def union(intervals: list[Interval]) -> list[Interval]:
    """Sorted and joined where they touch."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def length(intervals: list[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def covered(intervals: list[Interval], by: list[Interval]) -> float:
    """How much of `intervals` lies within `by`; both are unions."""
    return sum(
        max(0.0, min(stop, other_stop) - max(start, other_start))
        for start, stop in intervals
        for other_start, other_stop in by
    )


def build(stage: int, options: argparse.Namespace):
    shape = DecoderShape(32_000, options.hidden, options.layers, 16, 16, options.hidden * 11 // 4)
    with torch.device("meta"):
        model = Decoder(shape)
    config = {
        "train_micro_batch_size_per_gpu": options.rows,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    return initialize(model, load_engine(config), device="cuda")


def take_step(engine, ids) -> None:
    logits = engine(ids[:, :-1])
    engine.backward(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()))
    engine.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--most", type=float, default=0.5, help="largest exposed share of communication at stage 3")
    options = parser.parse_args()
    world = init_world("cuda")
    torch.set_num_threads(8)
    failed = False
    for stage in (1, 2, 3):
        engine = build(stage, options)
        ids = torch.randint(0, 32_000, (options.rows, options.sequence + 1), device=world.device)
        for _ in range(4):
            take_step(engine, ids)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            take_step(engine, ids)
            torch.cuda.synchronize()
        failed |= report(stage, profiled, world, options)
        engine.destroy()
        del engine
        torch.cuda.empty_cache()
    shutdown_world()
    return int(failed)


def report(stage: int, profiled, world, options: argparse.Namespace) -> bool:
    kernels = [e for e in profiled.profiler.kineto_results.events() if "cuda" in str(e.device_type()).lower()]
    kernels = [e for e in kernels if e.duration_ns() > 0 and not e.name().startswith(("Mem", "nccl:", "ProfilerStep"))]
    of = {"nccl": [], "compute": []}
    streams: dict[str, set[int]] = {"AllGather": set(), "ReduceScatter": set()}
    for event in kernels:
        name, start = event.name(), event.start_ns() / 1e3
        is_nccl = name.startswith("ncclDevKernel")
        of["nccl" if is_nccl else "compute"].append((start, start + event.duration_ns() / 1e3))
        for kind in streams if is_nccl and event.duration_ns() > 50_000 else ():  # not the small agreements
            if kind in name:
                streams[kind].add(event.device_resource_id())
    communication, computation = union(of["nccl"]), union(of["compute"])
    everything = union(of["nccl"] + of["compute"])
    span = everything[-1][1] - everything[0][0]
    exposed = length(communication) - covered(communication, computation)
    share = exposed / max(length(communication), 1e-9)
    is_apart = not (streams["AllGather"] & streams["ReduceScatter"])
    if world.rank == 0:
        print(
            f"stage {stage}: step {span / 1e3:7.2f} ms, computation {length(computation) / 1e3:7.2f} ms, communication "
            f"{length(communication) / 1e3:6.2f} ms, exposed {exposed / 1e3:6.2f} ms ({share:.0%}), idle "
            f"{(span - length(everything)) / 1e3:5.2f} ms, streams {streams}",
            flush=True,
        )
    return not is_apart or (stage == 3 and share > options.most)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
