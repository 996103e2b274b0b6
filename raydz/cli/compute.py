"""What computes here: torch, its threads and backends, the compiled kernels, the GPUs.

Neighbours: `report.py` asks; `raydz.ops.native` says which kernels run. The only part of the report that imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from raydz.cli.finding import Finding
from raydz.units import format_bytes

_DRIVER = Path("/proc/driver/nvidia/version")


def kernels() -> Iterator[Finding]:
    """The compiled optimizer kernels and their instruction set."""
    from raydz.ops import native

    found = native.describe()
    if found["version"] is None:
        yield Finding(
            "native kernels", "odd", "not installed: torch computes the same, several times slower on the CPU",
            "install a C++17 compiler (apt-get install g++) and then raydz again",
        )  # fmt: skip
    else:
        yield Finding("native kernels", "ok", f"{found['isa']}, version {found['version']}")


def threads() -> Iterator[Finding]:
    """Threads that torch takes here; a run sets its own, by train.threads."""
    import torch

    setting = os.environ.get("OMP_NUM_THREADS")
    source = f"OMP_NUM_THREADS={int(setting)}" if setting and setting.isdigit() else "its own choice"
    yield Finding("torch threads", "ok", f"{torch.get_num_threads()} ({source}); a run takes train.threads")


def backends() -> Iterator[Finding]:
    """Process group backends of this torch."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("torch.distributed", "broken", "not part of this torch", "install torch from PyPI")
        return
    names = [
        name for name, is_there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if is_there
    ]
    yield judge_backends(names, torch.cuda.device_count())


def judge_backends(names: Sequence[str], num_gpus: int) -> Finding:
    """CPUs need gloo, GPUs need NCCL."""
    missing = [name for name, needed in (("gloo", True), ("nccl", num_gpus > 0)) if needed and name not in names]
    detail = ", ".join(names) or "none"
    if missing:
        return Finding(
            "torch.distributed", "broken", f"{detail}; no {' and '.join(missing)}", "install torch from PyPI"
        )
    return Finding("torch.distributed", "ok", detail)


def gpus() -> Iterator[Finding]:
    """GPUs that torch can use."""
    import torch

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            devices.append(f"{found.name} ({format_bytes(found.total_memory)})")
    yield judge_gpus(devices, torch.version.cuda, _DRIVER.exists(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def attention() -> Iterator[Finding]:
    """The kernels that attention of common sizes would run here, for whole rows and for several documents in a row."""
    import torch

    from raydz.models.attention import AttentionCase, choose

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    said = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        plain, masked = (choose(AttentionCase(8, 2, 64, dtype, device, masked)).kernel for masked in (False, True))
        said.append(f"{name} {plain}" if plain == masked else f"{name} {plain}, with documents {masked}")
    yield Finding("attention", "ok", f"on {device.type}: {'; '.join(said)}")


def judge_gpus(devices: Sequence[str], cuda: str | None, has_driver: bool, visible: str | None) -> Finding:
    """No GPU is fine, unless the machine has a driver for one.

    Args:
        devices: a text each, of those that torch sees.
        cuda: version that torch was built for; None for a CPU build.
        visible: CUDA_VISIBLE_DEVICES, if it is set.
    """
    if devices:
        counted = [f"{devices.count(text)} x {text}" for text in dict.fromkeys(devices)]
        return Finding("gpus", "ok", f"{', '.join(counted)}, CUDA {cuda}")
    if not has_driver:
        return Finding("gpus", "absent", "none: ranks run on the CPU over gloo")
    detail = "the machine has an NVIDIA driver, but torch sees no GPU"
    if cuda is None:
        return Finding("gpus", "odd", f"{detail}: it is a CPU build", "install a CUDA build of torch")
    if visible is not None:
        return Finding("gpus", "odd", f"{detail}: CUDA_VISIBLE_DEVICES is set", "unset CUDA_VISIBLE_DEVICES")
    remedy = f"compare the driver (nvidia-smi) with CUDA {cuda}, and the container's --gpus"
    return Finding("gpus", "odd", detail, remedy)
