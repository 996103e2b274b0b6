"""A training step with the optimizer in host memory: raydz's modes beside no offload, FSDP2, DeepSpeed and the ideal.

    python tests/bench/offload.py --device cpu                    # 20M parameters, a table
    python tests/bench/offload.py --device cuda --size 3.4b       # one GPU, 16,384 tokens a step
    python tests/bench/offload.py --device cuda --size 3.4b --moments bf16 --only none,speculative

Each contestant runs in a process of its own on one rank: bf16 over fp32 masters (split), AdamW, the global norm always
computed, blocks recomputed in backward, random tokens. A step lasts from one return of `engine.step()` to the next.

`speculative` never clips (rollback rate q = 0), `clipped` always does (q = 1, mode auto), `waiting` waits for the norm.
T* and T2 are the ideal times with and without speculation, from what `none` and `floor` measure in the same run:

    T* = max(g, c, d, h) + e     T2 = b + max(f, c) + e     e = (d + c + h) * last / N

g = f + b forward and backward; c the update of all N parameters by the kernel while both copies run; d, h gradients to
and weights from the host; `last` the parameters of the first unit, whose gradient comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from offload_contestants import OFFLOADED, SIZES, deepspeed_step, floor, fsdp2_step, mark, raydz_step

KINDS = ("none", "floor", "waiting", "speculative", "clipped", "ratio", "nvme", "fsdp2", "deepspeed")

# -- one contestant ----------------------------------------------------------------------------------------------------


def measure(kind: str, options: argparse.Namespace) -> None:
    """Runs in a process of its own, which prints the result as its last line."""
    import torch

    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(len(os.sched_getaffinity(0)) if device.type == "cpu" else 4)  # all contestants alike
    if kind == "floor":
        print("RESULT " + json.dumps({"metrics": floor(options, device), "note": ""}), flush=True)
        return
    told: Callable = dict
    try:
        if kind in ("fsdp2", "deepspeed"):
            torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
            step = (fsdp2_step if kind == "fsdp2" else deepspeed_step)(options, device)
        else:
            step, told = raydz_step(kind, options, device)
    except ImportError as error:
        print("RESULT " + json.dumps({"note": f"not installed: {error}"}), flush=True)
        return
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    generator, times = torch.Generator().manual_seed(0), []
    for _ in range(options.warmup + options.steps):
        ids = torch.randint(0, SIZES[options.size][4], (options.rows, options.sequence + 1), generator=generator)
        started = time.perf_counter()
        step(ids.to(device))
        if kind not in OFFLOADED:
            mark(device, True)
        times.append(time.perf_counter() - started)
    times = times[options.warmup :]
    metrics = {"step_s": statistics.median(times), "step_min_s": min(times), "step_max_s": max(times)}
    metrics["tokens_per_s"] = options.rows * options.sequence / metrics["step_s"]
    metrics["peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident_bytes()
    print("RESULT " + json.dumps({"metrics": metrics | told(), "note": ""}), flush=True)


def resident_bytes() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def run_once(kind: str, options: argparse.Namespace) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONWARNINGS": "ignore"}
    if options.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(Path(__file__)), "--one", kind, *sys.argv[1:]]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.limit_s)
    except subprocess.TimeoutExpired:
        return {"note": f"not done after {options.limit_s:g} s"}
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"note": "failed: " + " | ".join((done.stderr.strip().splitlines() or ["no output"])[-4:])}
    return json.loads(lines[-1])


# -- the ideal ---------------------------------------------------------------------------------------------------------


def ideal(results: dict[str, dict]) -> dict[str, float]:
    """T* and T2, see above; empty where `none` or `floor` did not run."""
    plain, rates = (results.get(kind, {}).get("metrics") for kind in ("none", "floor"))
    if not plain or not rates:
        return {}
    numel, forward, backward = plain["parameters"], plain["forward_s"], plain["backward_s"]
    update = numel * rates["ns_per_param"] * 1e-9
    out, back = (2 * numel / rates[f"{way}_bytes_per_s"] for way in ("d2h", "h2d"))
    rest = (out + update + back) * plain["last"] / numel
    return {
        "ideal_s": max(forward + backward, update, out, back) + rest,
        "ideal_waiting_s": backward + max(forward, update) + rest,
    }


def add_ratios(results: dict[str, dict]) -> None:
    best, plain = ideal(results), results.get("none", {}).get("metrics")
    for kind, result in results.items():
        metrics = result.get("metrics")
        if metrics and kind in OFFLOADED and plain:
            metrics["tokens_kept"] = plain["step_s"] / metrics["step_s"]
            metrics |= best
            if best:
                aim = "ideal_waiting_s" if not metrics.get("is_speculative") else "ideal_s"
                metrics["of_ideal"] = best[aim] / metrics["step_s"]


def print_table(results: dict[str, dict], options: argparse.Namespace) -> None:
    what = f"{options.size}, {options.rows} x {options.sequence} tokens a step"
    print(f"{what}, {options.moments} moments, {options.device}")
    heads = f"{'step s':>8} {'min':>7} {'max':>7} {'tokens/s':>9} {'peak GB':>8} {'q':>5} {'of ideal':>8} {'kept':>6}"
    print(f"{'':12} {heads}")
    for kind, result in results.items():
        m = result.get("metrics")
        if not m or "step_s" not in m:
            print(f"{kind:12} {result['note'] or json.dumps(m)}")
            continue
        extra = [f"{m[key]:{width}.2f}" if key in m else f"{'-':>{width - 0}}" for key, width in
                 (("rollback_rate", 5), ("of_ideal", 8), ("tokens_kept", 6))]  # fmt: skip
        print(
            f"{kind:12} {m['step_s']:8.3f} {m['step_min_s']:7.3f} {m['step_max_s']:7.3f} {m['tokens_per_s']:9.0f} "
            f"{m['peak_bytes'] / 1e9:8.2f} {' '.join(extra)}"
        )
        waits = {key: round(value, 3) for key, value in m.items() if key.startswith("wait_") or key == "host_bytes"}
        if waits:
            print(f"{'':12} {waits}")
    found = ideal(results)
    if found:
        print(f"T* {found['ideal_s']:.3f} s, T2 {found['ideal_waiting_s']:.3f} s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--only", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--moments", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--ratio", type=float, default=0.8, help="of the contestant of this name")
    parser.add_argument("--nvme-path", default="/tmp")
    parser.add_argument("--threads", type=int, help="of the update; default: all CPUs")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=300)
    parser.add_argument("--quick", action="store_true", help="the tiny model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.size, options.steps = "tiny", 5
    is_small = options.size in ("tiny", "20m")
    options.rows = options.rows or (4 if is_small else 8)
    options.sequence = options.sequence or (128 if is_small else 2048)
    return options


def main() -> None:
    options = parse()
    if options.one:
        measure(options.one, options)
        sys.stdout.flush()
        os._exit(0)
    results = {}
    for kind in KINDS:
        if kind in options.only.split(",") if options.only else kind != "nvme":
            results[kind] = run_once(kind, options)
            if not options.json:
                print(kind, json.dumps(results[kind]), file=sys.stderr, flush=True)
    add_ratios(results)
    if not options.json:
        print_table(results, options)
        return
    for kind, result in results.items():
        system = kind if kind in ("floor", "fsdp2", "deepspeed") else "raydz"
        row = {"bench": "offload", "system": system, "variant": kind if system == "raydz" else "", **result}
        print(json.dumps({**row, "device": options.device, "ranks": 1}))


if __name__ == "__main__":
    main()
