"""On a GPU: weights and activations in host memory, and states that move there on demand: bits, memory, time.

    python tests/cuda/parameters_check.py [bits pinned moves capped speed]

One rank. Prints a line a check and exits 1 if any failed. The oracle is the engine without offload. A cap on the
allocator makes a small device of a large one.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import raydz
from raydz.models import Decoder, DecoderShape

SMALL = DecoderShape(512, 256, 6, 4, 4, 704)
LARGE = DecoderShape(8192, 2048, 12, 16, 16, 5504)
DEEP = replace(LARGE, num_hidden_layers=24)
CAP_BYTES = 800 << 20
GB = 1e9
CPU = {"device": "cpu"}
SAVING = {
    "activation_checkpointing": {"cpu_checkpointing": True},
    "parallel": {"activation_checkpointing": "full", "offload_update": "waiting"},
}


def build(shape: DecoderShape, *, bf16: bool = True, zero: dict | None = None, **sections: Any):
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Decoder(shape)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, **(zero or {})},
        "parallel": {"activation_checkpointing": "full"},
        **sections,
    }
    return raydz.initialize(model, config, device="cuda")


def step(engine, number: int, rows: int = 4, length: int = 64):
    vocabulary = engine.module.shape.vocab_size
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, vocabulary, (rows, length + 1), generator=generator).cuda()
    engine.backward(engine.module(ids[:, :-1], labels=ids[:, 1:].contiguous()), denominator=float(rows * length))
    return engine.step()


def on_disk(**section: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(Path(tempfile.gettempdir()) / "raydz-parameters-check"), **section}


def clear() -> None:
    """Give back what engines of before and cuBLAS hold, and forget the peak."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def trained(steps: int = 4, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = build(SMALL, **options)
    norms = [step(engine, number).grad_norm for number in range(steps)]
    state = engine.full_state_dict()
    engine.destroy()
    return state, norms


def assert_same(found, wanted, what: str) -> None:
    assert found[1] == wanted[1], f"{what}: norms {found[1]} and {wanted[1]}"
    different = [name for name in wanted[0] if not torch.equal(found[0][name], wanted[0][name])]
    assert not different, f"{what}: {different[:3]} of {len(different)}"


def check_bits() -> str:
    ways = {
        "parameters": {"zero": {"offload_param": CPU}},
        "parameters, not pinned": {"zero": {"offload_param": {**CPU, "pin_memory": False}}},
        "parameters and optimizer": {"zero": {"offload_param": CPU, "offload_optimizer": CPU}},
        "activations": {"activation_checkpointing": {"cpu_checkpointing": True}},
        "parameters on a disk": {"zero": {"offload_param": on_disk(max_in_cpu=0)}},
        "all on a disk": {"zero": {"offload_param": on_disk(max_in_cpu=0), "offload_optimizer": on_disk()}},
    }
    for bf16 in (True, False):
        wanted = trained(bf16=bf16)
        assert_same(trained(bf16=bf16), wanted, "the same run again")
        for name, options in ways.items():
            assert_same(trained(bf16=bf16, **options), wanted, name)
    int8 = {"zero_quantized_weights": True}
    assert_same(trained(zero={"offload_param": CPU, **int8}), trained(zero=int8), "int8 weights")
    return f"bits: {', '.join(ways)} equal no offload, bf16 and fp32, four steps"


def check_pinned() -> str:
    for pinned in (True, False):
        engine = build(SMALL, zero={"offload_param": {**CPU, "pin_memory": pinned}})
        shards = [group.weights.compute for group in engine.sharded.groups if group.is_offloaded]
        assert shards and all(shard.is_pinned() == pinned and not shard.is_cuda for shard in shards)
        engine.destroy()
    return f"pin_memory: {len(shards)} shards in host memory, pinned or not as asked"


def check_capped() -> str:
    """Weights and gradients of a model that the device could not hold."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP_BYTES / total)
    try:
        try:
            engine = build(DEEP)
            step(engine, 0)
            raise AssertionError("it fits without offload: the cap is too high")
        except torch.OutOfMemoryError:
            pass
        engine = None
        clear()
        zero = {"offload_param": CPU, "offload_optimizer": CPU, "stage3_prefetch_bucket_size": 0}
        engine = build(DEEP, zero=zero | {"reduce_bucket_size": 20_000_000}, **SAVING)
        norms = [step(engine, number, rows=1, length=1024).grad_norm for number in range(3)]
        numel = sum(group.layout.padded_numel for group in engine.sharded.groups)
        peak = torch.cuda.max_memory_allocated()
        held = engine.host_memory.bytes_held
        engine.destroy()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(norm < float("inf") for norm in norms) and peak < CAP_BYTES
    return (
        f"capped at {CAP_BYTES / GB:.2f} GB: {numel / GB:.2f}G parameters train (bf16 weights {2 * numel / GB:.2f} GB, "
        f"states {16 * numel / GB:.1f} GB), peak {peak / GB:.2f} GB, host {held / GB:.1f} GB; without: out of memory"
    )


def timed(rows: int, length: int, **options: Any) -> tuple[float, float]:
    """(median seconds of a step, peak GB)."""
    clear()
    engine = build(LARGE, **options)
    times = []
    for number in range(7):
        torch.cuda.synchronize()
        since = time.perf_counter()
        step(engine, number, rows, length)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - since)
    engine.destroy()
    return statistics.median(times[2:]), torch.cuda.max_memory_allocated() / GB


def check_speed() -> str:
    offload = {"cpu_checkpointing": True}
    ways = {
        "none": {},
        "activations": {"activation_checkpointing": offload},
        "parameters": {"zero": {"offload_param": CPU}},
        "optimizer": {"zero": {"offload_optimizer": CPU}},
        "parameters, optimizer, activations": {
            "zero": {"offload_param": CPU, "offload_optimizer": CPU}, "activation_checkpointing": offload,
        },
    }  # fmt: skip
    rows = [f"{name} {seconds * 1e3:.0f} ms {peak:.2f} GB" for name, (seconds, peak) in
            ((name, timed(8, 2048, **options)) for name, options in ways.items())]  # fmt: skip
    return f"0.64G parameters, 8 x 2048 tokens, bf16, a step and its peak: {'; '.join(rows)}"


def check_moves() -> str:
    engine = build(LARGE)
    for number in range(2):
        step(engine, number)
    before, bits = torch.cuda.memory_allocated(), engine.full_state_dict()
    free, counts, times = torch.cuda.mem_get_info()[0], [], []
    for _ in range(20):
        torch.cuda.synchronize()
        since = time.perf_counter()
        engine.offload_states()
        middle = time.perf_counter()
        torch._C._cuda_clearCublasWorkspaces()
        counts.append((torch.cuda.memory_allocated(), engine.host_memory.bytes_held))
        given = torch.cuda.mem_get_info()[0] - free
        engine.reload_states()
        times.append((middle - since, time.perf_counter() - middle))
        assert torch.cuda.memory_allocated() <= before
    moved = engine.host_memory.bytes_held
    assert len(set(counts)) == 1 and counts[0][0] < 0.01 * before, (counts[:2], before)
    assert all(torch.equal(tensor, bits[name]) for name, tensor in engine.full_state_dict().items())
    wanted = [step(engine, number).grad_norm for number in (2, 3)]
    other = build(LARGE)
    found = [step(other, number).grad_norm for number in range(4)][2:]
    assert found == wanted, (found, wanted)
    out, back = (statistics.median(column) for column in zip(*times, strict=True))
    engine.destroy()
    other.destroy()
    return (
        f"moves: allocated {before / GB:.2f} -> {counts[0][0] / GB:.3f} GB and back 20 times, {given / GB:.2f} GB "
        f"given to the system, out {out:.3f} s ({moved / out / GB:.0f} GB/s), back {back:.3f} s "
        f"({moved / back / GB:.0f} GB/s), the first out {times[0][0]:.2f} s (pinning); then the same steps"
    )


def main() -> int:
    failed = 0
    checks = (check_bits, check_pinned, check_moves, check_capped, check_speed)
    wanted = sys.argv[1:]
    for check in [check for check in checks if not wanted or check.__name__.removeprefix("check_") in wanted]:
        clear()
        try:
            since = time.perf_counter()
            print(f"ok    {check()} [{time.perf_counter() - since:.0f} s]", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL  {check.__name__}: {type(error).__name__}: {error}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
