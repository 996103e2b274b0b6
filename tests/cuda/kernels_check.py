"""The kernels for GPUs against the CPU's, bit for bit, and their bandwidth beside torch's: not collected by pytest.

    python tests/cuda/kernels_check.py

Prints one line a check and exits 1 if any failed. The oracles are the C++ kernels, which `tests/ops` holds against
numpy.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from raydz.ops import adamw_step, split_master, sum_squares, sum_squares_of_all
from raydz.ops.adamw import Buffers, adamw_reference, step_scalars

SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
BANDWIDTH_NUMEL = 1 << 27


def make(numel: int, grad_dtype: torch.dtype, split: bool, out_dtype: torch.dtype | None) -> dict:
    generator = torch.Generator().manual_seed(numel)
    master, grad, exp_avg, exp_avg_sq = torch.randn(4, numel, generator=generator)
    exp_avg_sq = exp_avg_sq.square() * torch.logspace(-30, 3, numel)  # magnitudes of all kinds, denormal ones too
    if numel > 8:
        grad[3], grad[5], grad[7] = float("inf"), float("nan"), -float("inf")
    hi, low = split_master(master) if split else (master, None)
    out = None if out_dtype is None else torch.zeros(numel, dtype=out_dtype)
    return dict(
        master=hi, grad=grad.to(grad_dtype), exp_avg=exp_avg * 0.1, exp_avg_sq=exp_avg_sq, low=low, out=out
    )  # fmt: skip


def on_gpu(buffers: dict) -> dict:
    return {name: None if t is None else t.cuda() for name, t in buffers.items()}


def differing(cpu: dict, gpu: dict) -> list[str]:
    """Names of buffers with other bits; NaNs are equal to each other."""
    names = []
    for name, left in cpu.items():
        if left is None:
            continue
        right = gpu[name].cpu()
        if left.is_floating_point():
            as_int = torch.int32 if left.element_size() == 4 else torch.int16
            same = (left.view(as_int) == right.view(as_int)) | (left.isnan() & right.isnan())
        else:
            same = (left == right) | cpu["master"].isnan()
        names += [] if bool(same.all()) else [name]
    return names


def check_bits() -> int:
    failed = cases = 0
    floats = (torch.float32, torch.bfloat16, torch.float16)
    forms = [(False, None), (False, torch.bfloat16), (False, torch.float16), (True, None)]
    for numel, grad_dtype, (split, out_dtype), decoupled in itertools.product(
        (0, 1, 31, 1024, 1025, 100_003), floats, forms, (True, False)
    ):
        cpu = make(numel, grad_dtype, split, out_dtype)
        gpu, reference = on_gpu(cpu), on_gpu(cpu)
        for step in (1, 2, 7):
            options = {**SETTINGS, "step": step, "grad_scale": 0.37, "decoupled": decoupled}
            counts = [int(adamw_step(**cpu, **options)), int(adamw_step(**gpu, **options))]
            order = [reference[name] for name in Buffers._fields]
            counts.append(int(adamw_reference(Buffers(*order), step_scalars(**options), decoupled)))
            wrong = differing(cpu, gpu) + [f"reference {name}" for name in differing(cpu, reference)]
            cases += 1
            if wrong or len(set(counts)) != 1:
                failed += 1
                print(f"FAIL {numel} {grad_dtype} split={split} out={out_dtype} step {step}: {wrong} {counts}")
    print(f"{'ok  ' if not failed else 'FAIL'} {cases} steps on the GPU have the bits of the CPU's kernel")
    return failed


def check_sums() -> int:
    failed = 0
    tensors = [
        (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale).to(dtype)
        for numel in (0, 1, 17, 4095, 4096, 4097, 100_003, 1 << 22)
        for scale, dtype in ((1.0, torch.float32), (2e19, torch.float32), (1.0, torch.bfloat16), (1.0, torch.float16))
    ]
    tensors += [torch.tensor([1.0, bad, 2.0]) for bad in (float("inf"), float("nan"))]
    found = sum_squares_of_all([values.cuda() for values in tensors])
    for values, on_gpu_sum in zip(tensors, found, strict=True):
        on_cpu_sum = sum_squares(values)
        if on_gpu_sum != on_cpu_sum and not (math.isnan(on_gpu_sum) and math.isnan(on_cpu_sum)):
            failed += 1
            print(f"FAIL sum of squares of {values.numel()} {values.dtype}: {on_gpu_sum!r}, wanted {on_cpu_sum!r}")
    print(f"{'ok  ' if not failed else 'FAIL'} {len(tensors)} sums of squares have the bits of the CPU's kernel")
    return failed


def seconds(call, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def show_bandwidth() -> None:
    n = BANDWIDTH_NUMEL
    b = {k: None if v is None else v.cuda() for k, v in make(1 << 20, torch.bfloat16, True, None).items()}
    b = {k: None if v is None else v.repeat(n >> 20) for k, v in b.items()}
    b["grad"].zero_()
    rows = {"raydz, split master, bf16 gradient": (26, lambda: adamw_step(**b, **SETTINGS, step=3))}
    p = torch.nn.Parameter(torch.randn(n, device="cuda"))
    p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW([p], lr=1e-3, fused=True)
    rows["torch fused, fp32"] = (28, optimizer.step)
    x, y = torch.empty(n, device="cuda"), torch.empty(n, device="cuda")
    rows["raydz, sum of squares, fp32"] = (4, lambda: sum_squares(p))
    rows["torch, linalg.vector_norm, fp32"] = (4, lambda: float(torch.linalg.vector_norm(p.detach())))
    rows["floor: copy"] = (8, lambda: y.copy_(x))
    for name, (num_bytes, call) in rows.items():
        taken = seconds(call)
        print(f"{name:36} {taken / n * 1e12:8.2f} ps/element {num_bytes * n / taken / 1e12:6.2f} TB/s")


if __name__ == "__main__":
    failures = check_bits() + check_sums()
    show_bandwidth()
    sys.exit(1 if failures else 0)
