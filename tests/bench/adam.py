"""One AdamW step on host memory: nanoseconds a parameter, beside torch's fused AdamW and the memory's own speed.

    python tests/bench/adam.py --quick            # a table, under a minute on two cores
    python tests/bench/adam.py --threads 2 --json # one JSON line a result

Every row updates the same number of parameters in its own process: fp32 master and moments, bf16 gradient in, bf16
weight out (28 bytes a parameter), except where its name says otherwise. `floor` is 28 bytes at the bandwidth of an
in-place triad, `a += s * b`, which like the update writes only what it has read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from raydz.ops import adamw_step, native, split_master
from raydz.ops.adamw import Buffers, adamw_reference, step_scalars

SETTINGS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 10}
UPDATE_BYTES = 28


def state(numel: int) -> tuple[torch.Tensor, ...]:
    """Master, bf16 gradient, moments and bf16 weight."""
    grad = torch.randn(numel).bfloat16()
    return torch.randn(numel), grad, torch.zeros(numel), torch.rand(numel), torch.zeros_like(grad)


def raydz_fp32_master(numel: int, threads: int) -> Callable[[], object]:
    native.require()
    p, g, m, v, out = state(numel)
    return lambda: adamw_step(p, g, m, v, out=out, threads=threads, **SETTINGS)


def raydz_split_master(numel: int, threads: int) -> Callable[[], object]:
    native.require()
    p, g, m, v, _ = state(numel)
    hi, low = split_master(p)
    return lambda: adamw_step(hi, g, m, v, low=low, threads=threads, **SETTINGS)


def raydz_fp32_gradient(numel: int, threads: int) -> Callable[[], object]:
    native.require()
    p, g, m, v, _ = state(numel)
    g = g.float()
    return lambda: adamw_step(p, g, m, v, threads=threads, **SETTINGS)


def raydz_reference(numel: int, threads: int) -> Callable[[], object]:
    p, g, m, v, out = state(numel)
    return lambda: adamw_reference(Buffers(p, None, g, m, v, out), step_scalars(**SETTINGS), True)


def torch_fused_fp32(numel: int, threads: int) -> Callable[[], object]:
    p, g, *_ = state(numel)
    parameter = torch.nn.Parameter(p)
    parameter.grad = g.float()
    return torch.optim.AdamW([parameter], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True).step


def torch_cast_fused_cast(numel: int, threads: int) -> Callable[[], object]:
    p, g, _, _, out = state(numel)
    parameter = torch.nn.Parameter(p)
    parameter.grad = torch.empty_like(p)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        parameter.grad.copy_(g)
        optimizer.step()
        out.copy_(parameter.detach())

    return step


def floor_triad(numel: int, threads: int) -> Callable[[], object]:
    a, b = torch.zeros(numel), torch.randn(numel)
    return lambda: a.add_(b, alpha=1e-6)


ROWS: dict[str, tuple[str, Callable[[int, int], Callable[[], object]]]] = {
    "fp32_master": ("raydz", raydz_fp32_master),
    "split_master": ("raydz", raydz_split_master),
    "fp32_gradient": ("raydz", raydz_fp32_gradient),
    "reference": ("raydz", raydz_reference),
    "fused_fp32": ("torch", torch_fused_fp32),
    "cast_fused_cast": ("torch", torch_cast_fused_cast),
    "triad": ("floor", floor_triad),
}


def measure(variant: str, numel: int, threads: int, repeats: int) -> dict[str, float]:
    """Median, least and most of `repeats` steps after two warm-ups, in nanoseconds a parameter."""
    torch.set_num_threads(threads)
    work = ROWS[variant][1](numel, threads)
    work(), work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) / numel * 1e9)
    if variant == "triad":
        taken = [ns * UPDATE_BYTES / 12 for ns in taken]
    median = statistics.median(taken)
    metrics = {"ns_per_param": median, "ns_per_param_min": min(taken), "ns_per_param_max": max(taken)}
    return metrics | {"step_s": median * numel / 1e9}


def result_of(variant: str, arguments: argparse.Namespace) -> dict[str, object]:
    system = ROWS[variant][0]
    line = {"bench": "adam", "system": system, "variant": variant, "device": "cpu", "ranks": 1}
    command = [sys.executable, __file__, "--measure", variant, "--threads", str(arguments.threads)]
    command += ["--numel", str(arguments.numel), "--repeats", str(arguments.repeats)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        note = f"{arguments.numel} parameters, {arguments.threads} threads, isa {native.describe()['isa']}"
        return {**line, "metrics": json.loads(run.stdout), "note": note}
    if "NativeError" in run.stderr:
        return {**line, "note": "not installed"}
    raise SystemExit(run.stderr)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--ranks", type=int, choices=[1], default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default=",".join(ROWS), help="variants or systems, with commas")
    parser.add_argument("--quick", action="store_true", help="fewer parameters and repeats")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--numel", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--measure", choices=list(ROWS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.numel = arguments.numel or (1 << 24 if arguments.quick else 1 << 26)
    arguments.repeats = arguments.repeats or (7 if arguments.quick else 15)
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.numel, arguments.threads, arguments.repeats)))
        return
    wanted = arguments.only.split(",")
    for variant, (system, _) in ROWS.items():
        if variant not in wanted and system not in wanted:
            continue
        result = result_of(variant, arguments)
        if arguments.json:
            print(json.dumps(result), flush=True)
            continue
        metrics = result.get("metrics")
        figures = (
            "{ns_per_param:6.2f} ns ({ns_per_param_min:.2f}-{ns_per_param_max:.2f})".format(**metrics)
            if metrics
            else ""
        )
        print(f"{system:<6} {variant:<16} {figures or result['note']}", flush=True)


if __name__ == "__main__":
    main()
