"""The contestants of `offload.py`: each builds its engine around the same decoder and returns a step; and the floor."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

SIZES = {  # hidden, layers, heads, intermediate, vocabulary
    "tiny": (64, 2, 4, 176, 512),
    "20m": (384, 8, 6, 1024, 8192),
    "1.4b": (2048, 24, 16, 5504, 32768),
    "3.4b": (3072, 28, 24, 8192, 32768),
    "7b": (4096, 32, 32, 11008, 32768),
}
OFFLOADED = ("waiting", "speculative", "clipped", "ratio", "nvme")


def engine_config(kind: str, options: argparse.Namespace) -> dict:
    clip = {"clipped": 1e-6, "waiting": 1e9, "speculative": 1e9}.get(kind, 1e9)
    config: dict = {
        "train_micro_batch_size_per_gpu": options.rows,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "bf16": {"enabled": True, "bf16_optimizer_states": options.moments == "bf16"},
        "zero_optimization": {"stage": options.stage},
        "parallel": {"activation_checkpointing": "full"},
    }
    if kind in OFFLOADED:
        section: dict = {"device": "nvme" if kind == "nvme" else "cpu"}
        section |= {"nvme_path": options.nvme_path} if kind == "nvme" else {}
        section |= {"ratio": options.ratio} if kind == "ratio" else {}
        config["zero_optimization"]["offload_optimizer"] = section
        mode = {"waiting": "waiting", "speculative": "speculative", "nvme": "waiting"}.get(kind, "auto")
        config["parallel"]["offload_update"] = mode
        if options.threads:
            config["parallel"]["offload_threads"] = options.threads
    return config


def build_decoder(options: argparse.Namespace, device, dtype):
    import torch

    from raydz.models import Decoder, DecoderShape

    hidden, layers, heads, intermediate, vocabulary = SIZES[options.size]
    shape = DecoderShape(vocabulary, hidden, layers, heads, heads, intermediate)
    torch.manual_seed(0)
    with torch.device(device):
        return Decoder(shape).to(dtype)


def mean_loss(model, ids):
    import torch.nn.functional as F

    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def raydz_step(kind: str, options: argparse.Namespace, device) -> tuple[Callable, Callable]:
    """A step, and what is to be told about the last one."""
    import torch

    import raydz

    engine = raydz.initialize(
        build_decoder(options, device, torch.bfloat16), engine_config(kind, options), device=device.type
    )
    parts: list[tuple[float, float]] = []
    waits: list[dict[str, float]] = []

    def step(ids):
        marks = [mark(device, kind == "none")]
        loss = mean_loss(engine, ids)
        marks.append(mark(device, kind == "none"))
        engine.backward(loss)
        marks.append(mark(device, kind == "none"))
        report = engine.step()
        if kind == "none":
            parts.append((marks[1] - marks[0], marks[2] - marks[1]))
        if report.offload is not None:
            busy = {"none_updating": report.offload.updating_s, "none_ahead": report.offload.ahead_s}
            waits.append(report.offload.waits_s | busy)
        return loss

    def told() -> dict:
        groups = engine.optimizer.groups
        hidden, _, _, _, vocabulary = SIZES[options.size]
        found = {"parameters": sum(g.layout.padded_numel for g in groups), "last": hidden * vocabulary}
        if parts:
            forward, backward = zip(*parts[1:], strict=True)
            found |= {"forward_s": statistics.median(forward), "backward_s": statistics.median(backward)}
        offload = engine.last_report.offload
        if offload is not None:
            found |= {"rollback_rate": offload.rollback_rate, "host_bytes": engine.host_memory.bytes_held}
            found["is_speculative"] = float(offload.mode == "speculative")
            for cause in sorted({cause for each in waits for cause in each}):
                found[f"wait_{cause}_s"] = statistics.median(each.get(cause, 0.0) for each in waits)
        return found

    return step, told


def mark(device, is_exact: bool) -> float:
    if is_exact and device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def fsdp2_step(options: argparse.Namespace, device) -> Callable:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from raydz.models.checkpointing import wrap_blocks

    model = build_decoder(options, device, torch.float32)
    wrap_blocks(model, "full", None)
    keywords = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for block in model.model.layers:
        fully_shard(block, **keywords)
    fully_shard(model, **keywords)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, 1e-5, fused=True)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)

    def step(ids):
        loss = mean_loss(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1e9)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def deepspeed_step(options: argparse.Namespace, device) -> Callable:
    import deepspeed
    import torch

    from raydz.models.checkpointing import wrap_blocks

    model = build_decoder(options, device, torch.float32)
    wrap_blocks(model, "full", None)
    config = engine_config("none", options)
    config["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": False}
    config["bf16"] = {"enabled": True}
    del config["parallel"]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)

    def step(ids):
        loss = mean_loss(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def floor(options: argparse.Namespace, device) -> dict:
    """Rates of the machine: copies out and in at once, and the kernel while they run."""
    import threading

    import torch

    from raydz.offload.links import Links
    from raydz.offload.memory import HostMemory
    from raydz.ops.adamw import adamw_step
    from raydz.ops.operands import Into

    numel = 1 << (27 if device.type == "cuda" else 22)
    threads = options.threads or len(os.sched_getaffinity(0))
    memory, links = HostMemory(1 << 36), Links(device)
    state_dtype = torch.bfloat16 if options.moments == "bf16" else torch.float32
    hi, low = (memory.empty(numel, d, pinned=False) for d in (torch.bfloat16, torch.int16))
    m, v = (memory.empty(numel, state_dtype, pinned=False) for _ in range(2))
    grad = memory.empty(numel, torch.bfloat16, pinned=False)
    noise = (1, 0) if options.moments == "bf16" else None
    pairs = [(torch.zeros(numel, dtype=torch.bfloat16, device=device), memory.empty(numel, torch.bfloat16))
             for _ in range(2)]  # fmt: skip
    done, moved = threading.Event(), [0, 0]

    def copy(direction: int) -> None:
        (there, here), before = pairs[direction], links.here()
        while not done.is_set():
            mark = links.to_host(there, here) if direction == 0 else links.to_device(here, there, links.here())
            before.synchronize()  # one copy is always waiting behind the one that runs
            before = mark
            moved[direction] += here.nbytes

    second = Into(
        *(memory.empty(numel, d, pinned=False) for d in (torch.bfloat16, torch.int16)),
        tuple(memory.empty(numel, state_dtype, pinned=False) for _ in range(2)),
    )

    def kernel_s(into: Into | None = None, repeats: int = 9) -> float:
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            adamw_step(hi, grad, m, v, low=low, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1,
                       noise=noise, threads=threads, into=into)  # fmt: skip
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    alone_s, second_alone_s = kernel_s(), kernel_s(second)
    copiers = [threading.Thread(target=copy, args=(direction,)) for direction in (0, 1)]
    started = time.perf_counter()
    for each in copiers:
        each.start()
    busy_s, second_s = kernel_s(), kernel_s(second)
    elapsed = time.perf_counter() - started
    done.set()
    for each in copiers:
        each.join()
    rates = {name: count / elapsed for name, count in zip(("d2h", "h2d"), moved, strict=True)}
    return {
        "ns_per_param": busy_s / numel * 1e9, "ns_per_param_alone": alone_s / numel * 1e9,
        "ns_per_param_second": second_s / numel * 1e9, "ns_per_param_second_alone": second_alone_s / numel * 1e9,
        "d2h_bytes_per_s": rates["d2h"], "h2d_bytes_per_s": rates["h2d"], "threads": threads,
    }  # fmt: skip
