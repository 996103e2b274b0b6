"""What an engine costs beside the computation, at a world size this machine does not have: torch's `fake` backend.

    python tests/bench/host.py            # a table
    python tests/bench/host.py --json

One process plays rank 0 of 8; collectives return at once and move nothing, so losses mean nothing, but every gather,
reduction, allocation and hook happens. `step_s` less the time of plain torch (no engine, same model and batch) is the
engine's host overhead; `gathers` and `reductions` count launches a step; `state_bytes` what the rank holds between
steps; `peak_bytes` the largest resident size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.step import build_decoder, engine_config, mean_loss, peak_bytes, torch_step

KINDS = ("torch", "fsdp2", "raydz-1", "raydz-2", "raydz-3")
WORLD_SIZE = 8
GATHERS = ("all_gather_into_tensor", "all_gather_single")  # torch 2.13 renamed them
REDUCTIONS = ("reduce_scatter_tensor", "reduce_scatter_single")


def count_calls(names: tuple[str, ...]) -> dict[str, int]:
    """Count calls of the functional collectives that FSDP2 launches."""
    counts = dict.fromkeys(names, 0)

    def counted(name: str, call: Callable) -> Callable:
        def wrapper(*args, **kwargs):
            counts[name] += 1
            return call(*args, **kwargs)

        return wrapper

    for name in [name for name in names if hasattr(dist, name)]:
        setattr(dist, name, counted(name, getattr(dist, name)))
    return counts


def contestant(
    kind: str, options: argparse.Namespace
) -> tuple[Callable, Callable[[], int], Callable[[], tuple[int, int]]]:
    """The step; bytes of parameters, gradients and states it holds; launches so far (gathers, reductions)."""
    if kind.startswith("raydz"):
        import raydz

        engine = raydz.initialize(
            build_decoder("20m", True, "cpu"), engine_config(int(kind[-1]), options), device="cpu"
        )

        def step(ids) -> None:
            engine.backward(mean_loss(engine, ids))
            engine.step()

        def held() -> int:
            tensors = [t for state in engine.optimizer.states for t in state.values()]
            for group in engine.sharded.groups:
                tensors += [group.full, group.weights.compute]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            return sum(storages.values())

        return step, held, lambda: (engine.comms.gather.log.count, engine.comms.reduce.log.count)
    model = build_decoder("20m", False, "cpu")
    counts = count_calls(GATHERS + REDUCTIONS)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())

    def held() -> int:
        local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
        return sum(3 * p.untyped_storage().nbytes() for p in local)  # weights and AdamW's two moments

    return (
        torch_step(model, parameters, False),
        held,
        lambda: tuple(sum(counts[name] for name in names) for names in (GATHERS, REDUCTIONS)),
    )


def measure(kind: str, options: argparse.Namespace) -> dict:
    """One contestant, in this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    torch.set_num_threads(1)
    step, held, launches = contestant(kind, options)
    torch.set_num_threads(1)
    ids = torch.randint(0, 8192, (options.rows, options.sequence + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(options.warmup):
        step(ids)
    before, times = launches(), []
    for _ in range(options.steps):
        started = time.perf_counter()
        step(ids)
        times.append(time.perf_counter() - started)
    gathers, reductions = ((b - a) / options.steps for a, b in zip(before, launches(), strict=True))
    figures = {"step_s": statistics.median(times), "step_min_s": min(times), "gathers": gathers}
    return figures | {"reductions": reductions, "state_bytes": held(), "peak_bytes": peak_bytes(torch.device("cpu"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.bf16 = False
    if options.one:
        print("RESULT " + json.dumps(measure(options.one, options)), flush=True)
        os._exit(0)
    plain = None
    for kind in [k for k in KINDS if not options.only or k in options.only.split(",")]:
        command = [sys.executable, str(Path(__file__)), "--one", kind, *sys.argv[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        metrics = json.loads(lines[0][7:]) if lines else {}
        plain = metrics.get("step_s") if kind == "torch" else plain
        if plain and metrics:
            metrics["overhead_s"] = metrics["step_s"] - plain
        note = "" if lines else (done.stderr.strip().splitlines() or ["failed"])[-1]
        if options.json:
            row = {"bench": "host", "system": kind.split("-")[0], "variant": kind.partition("-")[2], "device": "cpu"}
            print(json.dumps({**row, "ranks": WORLD_SIZE, "metrics": metrics, "note": note}))
        else:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            print(f"{kind:8} {shown or note}")


if __name__ == "__main__":
    main()
