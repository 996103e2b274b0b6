"""One training step of the same decoder on the same tokens: raydz's stages beside plain torch, DDP, FSDP2, DeepSpeed.

    python tests/bench/step.py --device cpu --ranks 2          # a table
    python tests/bench/step.py --device cpu --ranks 2 --json   # one JSON line a result

Every contestant runs in processes of its own, one after the other, `--rounds` times in turn, so that a noisy machine is
noisy for all; the best round counts. All use one torch thread a rank, AdamW at lr 1e-3, the global norm clipped to 1,
fp32 (or bf16 over fp32 masters with --bf16). FLOPs: 6 a matrix parameter and causal attention once, both passes.
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

SIZES = {  # hidden, layers, heads, intermediate, vocabulary
    "tiny": (64, 2, 4, 176, 512),
    "20m": (384, 8, 6, 1024, 8192),
    "125m": (768, 12, 12, 2048, 32768),
    "1b": (2048, 24, 16, 5632, 32768),
}
KINDS = ("torch", "ddp", "fsdp2", "deepspeed-2", "deepspeed-3", "raydz-0", "raydz-1", "raydz-2", "raydz-3")
SYSTEMS = {"torch": "torch", "ddp": "ddp", "fsdp2": "fsdp2", "deepspeed": "deepspeed", "raydz": "raydz"}


# -- contestants: each builds its engine around the model and returns a function that takes one step -----------------


def build_decoder(size: str, on_meta: bool, device):
    import torch

    from raydz.models import Decoder, DecoderShape

    hidden, layers, heads, intermediate, vocabulary = SIZES[size]
    shape = DecoderShape(vocabulary, hidden, layers, heads, heads, intermediate)
    with torch.device("meta" if on_meta else device):
        torch.manual_seed(0)
        return Decoder(shape)


def mean_loss(model, ids):
    import torch.nn.functional as F

    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def torch_step(model, params, bf16: bool) -> Callable:
    import torch

    optimizer = torch.optim.AdamW(params, 1e-3, fused=True)

    def step(ids):
        loss = mean_loss(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def contestant(kind: str, options: argparse.Namespace, device) -> tuple[Callable, int]:
    """The step function of `kind`, and the model's FLOPs a token."""
    import torch
    import torch.distributed as dist

    system, _, stage = kind.partition("-")
    model = build_decoder(options.size, system == "raydz", device)
    flops = model.flops_per_token(options.sequence)
    if system == "raydz":
        import raydz

        engine = raydz.initialize(model, engine_config(int(stage), options), device=device.type)

        def step(ids):
            loss = mean_loss(engine, ids)
            engine.backward(loss)
            engine.step()
            return loss

        return step, flops
    if system == "deepspeed":
        import deepspeed

        config = engine_config(int(stage), options)
        config["zero_optimization"]["overlap_comm"] = False
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        del config["optimizer"]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(ids):
            loss = mean_loss(engine, ids)
            engine.backward(loss)
            engine.step()
            return loss

        return step, flops
    if system == "ddp" and dist.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if system == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        keywords: dict = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
        if options.bf16:
            keywords["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.model.layers:
            fully_shard(block, **keywords)
        fully_shard(model, **keywords)
    if options.bf16 and system in ("torch", "ddp"):
        raise ImportError("plain torch and DDP have no bf16 over fp32 masters of their own")
    return torch_step(model, list(model.parameters()), options.bf16), flops


def engine_config(stage: int, options: argparse.Namespace) -> dict:
    return {
        "train_micro_batch_size_per_gpu": options.rows,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": options.bf16},
    }


# -- one rank of one contestant ----------------------------------------------------------------------------------------


def measure(kind: str, options: argparse.Namespace) -> None:
    """Runs in a rank's process; rank 0 prints the result as the last line."""
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist_ranks()))  # they make the initial weights
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        step, flops = contestant(kind, options, device)
    except ImportError as error:
        print("RESULT " + json.dumps({"note": f"not installed: {error}" if "No module" in str(error) else str(error)}))
        return
    torch.set_num_threads(1)  # DeepSpeed changes it
    generator = torch.Generator().manual_seed(dist.get_rank())
    times, losses = [], []
    for _ in range(options.warmup + options.steps):
        ids = torch.randint(0, SIZES[options.size][4], (options.rows, options.sequence + 1), generator=generator)
        ids = ids.to(device)
        dist.barrier()
        started = time.perf_counter()
        loss = step(ids)
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - started)
        losses.append(float(loss.detach()))
    if dist.get_rank() == 0:
        times = times[options.warmup :]
        step_s = statistics.median(times)
        tokens = options.rows * options.sequence * (1 if kind == "torch" else dist.get_world_size())
        metrics = {
            "step_s": step_s,
            "step_min_s": min(times),
            "step_max_s": max(times),
            "tokens_per_s": tokens / step_s,
            "flops_per_s": flops * tokens / step_s,
            "peak_bytes": peak_bytes(device),
            "last_loss": losses[-1],
        }
        print("RESULT " + json.dumps({"metrics": metrics, "note": ""}), flush=True)


def dist_ranks() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def peak_bytes(device) -> int:
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


# -- the contest -------------------------------------------------------------------------------------------------------


def run_once(kind: str, options: argparse.Namespace) -> dict:
    """One contestant in fresh processes."""
    ranks = 1 if kind == "torch" else options.ranks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(port),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_SKIP_CUDA_CHECK": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, str(Path(__file__)), "--one", kind, *sys.argv[1:]],
        env=environment, capture_output=True, text=True, timeout=options.limit_s,
    )  # fmt: skip
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"note": "failed: " + (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(lines[0])


def contest(options: argparse.Namespace) -> dict[str, dict]:
    """All contestants in turn, `rounds` times; for each the round with the best median."""
    kinds = [kind for kind in KINDS if not options.only or kind in options.only.split(",")]
    best: dict[str, dict] = {}
    for _ in range(options.rounds):
        for kind in kinds:
            if best.get(kind, {}).get("note"):
                continue
            result = run_once(kind, options)
            known = best.get(kind, {}).get("metrics")
            if "metrics" not in result or not known or result["metrics"]["step_s"] < known["step_s"]:
                best[kind] = result
    return best


def print_table(results: dict[str, dict], options: argparse.Namespace) -> None:
    print(f"{options.size}, {options.rows} x {options.sequence} tokens a rank, {options.ranks} ranks, {options.device}")
    heads = f"{'step s':>8} {'min':>7} {'max':>7} {'tokens/s':>9} {'GFLOP/s':>8} {'peak MB':>8}"
    print(f"{'':12} {heads} {'of DDP':>7} {'of FSDP2':>8}")
    reference = {name: results.get(name, {}).get("metrics", {}).get("step_s") for name in ("ddp", "fsdp2")}
    for kind, result in results.items():
        m = result.get("metrics")
        if not m:
            print(f"{kind:12} {result['note']}")
            continue
        ratios = [f"{m['step_s'] / base:.3f}" if base else "-" for base in reference.values()]
        print(
            f"{kind:12} {m['step_s']:8.3f} {m['step_min_s']:7.3f} {m['step_max_s']:7.3f} {m['tokens_per_s']:9.0f} "
            f"{m['flops_per_s'] / 1e9:8.1f} {m['peak_bytes'] / 1e6:8.0f} {ratios[0]:>7} {ratios[1]:>8}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--rows", type=int, default=4, help="rows of a rank's step")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=400)
    parser.add_argument("--quick", action="store_true", help="the tiny model, one round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.size, options.rounds, options.steps = "tiny", 1, 5
    return options


def main() -> None:
    options = parse()
    if options.one:
        measure(options.one, options)
        sys.stdout.flush()
        os._exit(0)
    results = contest(options)
    if not options.json:
        print_table(results, options)
        return
    for kind, result in results.items():
        system, _, stage = kind.partition("-")
        row = {"bench": "step", "system": SYSTEMS[system], "variant": f"stage{stage}" if stage else "", **result}
        print(json.dumps({**row, "device": options.device, "ranks": 1 if kind == "torch" else options.ranks}))


if __name__ == "__main__":
    main()
