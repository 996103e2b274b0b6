"""One optimizer step on host memory, beside torch's fused AdamW, DeepSpeed's CPUAdam and the memory's own speed.

    python tests/bench/adam.py --quick                          # a table, under a minute on two cores
    python tests/bench/adam.py --threads 1,2 --isas all --json  # one JSON line a result

Every row updates the same number of parameters in its own process: AdamW with fp32 master and moments, bf16 gradient
in, bf16 weight out, except where its name says otherwise. `gbytes_per_s` counts the bytes that a row must move, each
read and each write (the table `ROWS` has them). `triad` is an in-place `a += s * b`, which like the update writes only
what it has read, `copy` is `a = b`; both are torch's, scaled to 28 bytes a parameter. DeepSpeed compiles its kernel
on the first call.
"""

from __future__ import annotations

import argparse
import itertools
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
from raydz.ops.batch import Batch
from raydz.ops.elementwise import lion_update, sgd_update
from raydz.ops.operands import Into, Operands
from raydz.ops.stochastic import Noise

SETTINGS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 10}
Step = Callable[[], object]


def state(numel: int) -> tuple[torch.Tensor, ...]:
    """Master, bf16 gradient, moments and bf16 weight."""
    grad = torch.randn(numel).bfloat16()
    return torch.randn(numel), grad, torch.zeros(numel), torch.rand(numel), torch.zeros_like(grad)


def raydz_fp32_master(numel: int, threads: int) -> Step:
    native.require()
    p, g, m, v, out = state(numel)
    return lambda: adamw_step(p, g, m, v, out=out, threads=threads, **SETTINGS)


def raydz_split_master(numel: int, threads: int) -> Step:
    native.require()
    p, g, m, v, _ = state(numel)
    hi, low = split_master(p)
    return lambda: adamw_step(hi, g, m, v, low=low, threads=threads, **SETTINGS)


def raydz_fp32_gradient(numel: int, threads: int) -> Step:
    native.require()
    p, g, m, v, _ = state(numel)
    g = g.float()
    return lambda: adamw_step(p, g, m, v, threads=threads, **SETTINGS)


def raydz_bf16_moments(numel: int, threads: int) -> Step:
    native.require()
    p, g, m, v, _ = state(numel)
    hi, low = split_master(p)
    m, v = m.bfloat16(), v.bfloat16()
    return lambda: adamw_step(hi, g, m, v, low=low, noise=Noise(1), threads=threads, **SETTINGS)


def raydz_apart(numel: int, threads: int) -> Step:
    """Into second buffers and back in turn, as speculative updates do."""
    native.require()
    p, g, m, v, out = state(numel)
    sides = [Into(p, None, (m, v)), Into(torch.zeros(numel), None, (torch.zeros(numel), torch.zeros(numel)))]

    def step() -> None:
        source, into = sides
        adamw_step(source.master, g, *source.states, out=out, threads=threads, into=into, **SETTINGS)
        sides.reverse()

    return step


def raydz_slices(numel: int, threads: int) -> Step:
    """The first row cut into slices of 3072 to 786432 elements with settings of their own, noted and run together."""
    native.require()
    parts, out = state(numel)[:4], torch.zeros(numel, dtype=torch.bfloat16)
    cuts, sizes = [0], itertools.cycle([3072, 786_432, 3072, 49_152, 200_001])
    while cuts[-1] < numel:
        cuts.append(min(numel, cuts[-1] + next(sizes)))
    slices = [slice(*pair) for pair in itertools.pairwise(cuts)]

    def step() -> None:
        batch = Batch()
        for part in slices:
            adamw_step(*(tensor[part] for tensor in parts), out=out[part], batch=batch, **SETTINGS)
        batch.run(threads)

    return step


def raydz_lion(numel: int, threads: int) -> Step:
    native.require()
    p, g, m, *_ = state(numel)
    hi, low = split_master(p)
    operands = Operands(hi, g, (m,), low)
    return lambda: lion_update(operands, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1, threads=threads)


def raydz_sgd(numel: int, threads: int) -> Step:
    native.require()
    p, g, m, *_ = state(numel)
    hi, low = split_master(p)
    settings = {"lr": 1e-4, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": True}
    return lambda: sgd_update(Operands(hi, g, (m,), low), **settings, is_first=False, threads=threads)


def raydz_reference(numel: int, threads: int) -> Step:
    p, g, m, v, out = state(numel)
    return lambda: adamw_reference(Buffers(p, None, g, m, v, out), step_scalars(**SETTINGS), True)


def torch_fused_fp32(numel: int, threads: int) -> Step:
    p, g, *_ = state(numel)
    parameter = torch.nn.Parameter(p)
    parameter.grad = g.float()
    return torch.optim.AdamW([parameter], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True).step


def torch_cast_fused_cast(numel: int, threads: int) -> Step:
    p, g, _, _, out = state(numel)
    parameter = torch.nn.Parameter(p)
    parameter.grad = torch.empty_like(p)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        parameter.grad.copy_(g)
        optimizer.step()
        out.copy_(parameter.detach())

    return step


def deepspeed_cpu_adam(numel: int, threads: int) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    p, g, *_ = state(numel)
    parameter = torch.nn.Parameter(p)
    parameter.grad = g.float()
    return DeepSpeedCPUAdam([parameter], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True).step


def floor_triad(numel: int, threads: int) -> Step:
    a, b = torch.zeros(numel), torch.randn(numel)
    return lambda: a.add_(b, alpha=1e-6)


def floor_copy(numel: int, threads: int) -> Step:
    a, b = torch.zeros(numel), torch.randn(numel)
    return lambda: a.copy_(b)


# name: (system, bytes a parameter, what makes the step)
ROWS: dict[str, tuple[str, int, Callable[[int, int], Step]]] = {
    "fp32_master": ("raydz", 28, raydz_fp32_master),
    "split_master": ("raydz", 26, raydz_split_master),
    "fp32_gradient": ("raydz", 28, raydz_fp32_gradient),
    "bf16_moments": ("raydz", 18, raydz_bf16_moments),
    "apart": ("raydz", 28, raydz_apart),
    "slices": ("raydz", 28, raydz_slices),
    "lion": ("raydz", 18, raydz_lion),
    "sgd": ("raydz", 18, raydz_sgd),
    "reference": ("raydz", 28, raydz_reference),
    "fused_fp32": ("torch", 28, torch_fused_fp32),
    "cast+fused+cast": ("torch", 40, torch_cast_fused_cast),
    "cpu_adam_fp32": ("deepspeed", 28, deepspeed_cpu_adam),
    "triad": ("floor", 28, floor_triad),
    "copy": ("floor", 28, floor_copy),
}
HAS_ISAS = ("fp32_master", "split_master", "fp32_gradient", "bf16_moments", "apart", "slices", "lion", "sgd")
MOVED = {"triad": 12, "copy": 8}  # bytes an element of the plain loops


def measure(
    variant: str, isa: str, numel: int, threads: int, repeats: int, stream_from: int | None
) -> dict[str, float]:
    """Median, least and most of `repeats` steps after two warm-ups, in nanoseconds a parameter."""
    torch.set_num_threads(threads)
    _, num_bytes, make = ROWS[variant]
    if variant in HAS_ISAS and isa:
        native.require().select_isa(isa)
    if stream_from is not None:
        native.require().set_stream_from(stream_from)
    work = make(numel, threads)
    work(), work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) / numel * 1e9)
    if variant in MOVED:
        taken = [ns * num_bytes / MOVED[variant] for ns in taken]
    median = statistics.median(taken)
    metrics = {"ns_per_param": median, "ns_per_param_min": min(taken), "ns_per_param_max": max(taken)}
    return metrics | {"gbytes_per_s": num_bytes / median, "step_s": median * numel / 1e9}


def result_of(variant: str, isa: str, threads: int, arguments: argparse.Namespace) -> dict[str, object]:
    line = {"bench": "adam", "system": ROWS[variant][0], "variant": variant, "device": "cpu", "ranks": 1}
    line |= {"threads": threads, "isa": isa}
    command = [sys.executable, __file__, "--measure", variant, "--threads", str(threads), "--isas", isa]
    command += ["--numel", str(arguments.numel), "--repeats", str(arguments.repeats)]
    if arguments.stream_from is not None:
        command += ["--stream-from", str(arguments.stream_from)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return {**line, "metrics": json.loads(run.stdout.splitlines()[-1]), "note": f"{arguments.numel} parameters"}
    if "NativeError" in run.stderr or "No module named 'deepspeed'" in run.stderr:
        return {**line, "note": "not installed"}
    if ROWS[variant][0] == "deepspeed":
        return {**line, "note": f"does not run: {run.stderr.strip().splitlines()[-1][:160]}"}
    raise SystemExit(run.stderr)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--ranks", type=int, choices=[1], default=1)
    parser.add_argument("--threads", default="1", help="numbers, with commas")
    parser.add_argument("--isas", default="", help="instruction sets, with commas, or `all`; default: the widest")
    parser.add_argument("--only", default=",".join(ROWS), help="variants or systems, with commas")
    parser.add_argument("--quick", action="store_true", help="fewer parameters and repeats")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--numel", type=int)
    parser.add_argument("--stream-from", type=int, help="elements from which results go past the caches")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--measure", choices=list(ROWS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.numel = arguments.numel or (1 << 24 if arguments.quick else 1 << 26)
    arguments.repeats = arguments.repeats or (7 if arguments.quick else 15)
    return arguments


def isas_of(variant: str, wanted: str) -> list[str]:
    """Instruction sets to measure a row with; one empty name where it has none."""
    module = native.load()
    if variant not in HAS_ISAS or module is None:
        return [""]
    if wanted == "all":
        return list(module.available_isas())
    return wanted.split(",") if wanted else [module.isa()]


def main() -> None:
    arguments = parse()
    if arguments.measure:
        options = (arguments.isas, arguments.numel, int(arguments.threads), arguments.repeats, arguments.stream_from)
        print(json.dumps(measure(arguments.measure, *options)))
        return
    wanted = arguments.only.split(",")
    for threads in map(int, arguments.threads.split(",")):
        for variant in [name for name, row in ROWS.items() if {name, row[0]} & set(wanted)]:
            for isa in isas_of(variant, arguments.isas):
                result = result_of(variant, isa, threads, arguments)
                print(json.dumps(result) if arguments.json else row_of(result), flush=True)


def row_of(result: dict[str, object]) -> str:
    head = "{system:<9} {variant:<16} {isa:<8} {threads:>2} threads ".format(**result)
    if "metrics" not in result:
        return head + str(result["note"])
    figures = "{ns_per_param:6.2f} ns ({ns_per_param_min:.2f}-{ns_per_param_max:.2f}) {gbytes_per_s:6.1f} GB/s"
    return head + figures.format(**result["metrics"])  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
