"""This machine: CPUs, memory, shared memory and disks, as the container that we may be in sees them.

Neighbours: `report.py` asks. Thresholds say where Ray or training begins to fail, see README.md, "Thresholds".
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from raydz.cli.finding import Finding
from raydz.tracking.memory import memory_bytes
from raydz.units import format_bytes

SHM_MIN_BYTES = 1 << 30
DISK_MIN_BYTES = 10 << 30
MEMORY_MAX_SHARE = 0.95  # of memory: Ray kills workers above it
DISK_MAX_SHARE = 0.95  # of the disk: Ray stops writing objects to it above it


def cpus(root: Path = Path("/")) -> Iterator[Finding]:
    """Cores that this process may use, and the container's limit where it is lower."""
    cores, limit = len(os.sched_getaffinity(0)), cpu_limit(root)
    if limit is not None and limit < cores:
        yield Finding(
            "cpus", "odd", f"{cores} seen, but this container may use {limit:g}",
            f"set train.threads so that all ranks of this machine take {max(1, math.floor(limit))} together",
        )  # fmt: skip
    else:
        yield Finding("cpus", "ok", str(cores))


def memory(root: Path = Path("/")) -> Iterator[Finding]:
    """Memory of the machine, or the container's limit where that is lower."""
    total, available = memory_bytes(root)
    detail = f"{format_bytes(available)} of {format_bytes(total)} free"
    if 1 - available / total > MEMORY_MAX_SHARE:
        remedy = "end other programs: Ray kills workers when memory is this full"
        yield Finding("memory", "odd", detail, remedy)
    else:
        yield Finding("memory", "ok", detail)


def disks() -> Iterator[Finding]:
    """Shared memory, the folder of temporary files (Ray's too) and the working directory (runs)."""
    yield shared_memory(Path("/dev/shm"))
    for name, path in (("temporary files", Path(tempfile.gettempdir())), ("working folder", Path.cwd())):
        usage = shutil.disk_usage(path)
        yield judge_disk(name, path, usage.total, usage.free)


def judge_disk(name: str, path: Path, total: int, free: int) -> Finding:
    """A disk that is nearly full is odd."""
    detail = f"{format_bytes(free)} of {format_bytes(total)} free at {path}"
    if free >= DISK_MIN_BYTES and 1 - free / total <= DISK_MAX_SHARE:
        return Finding(name, "ok", detail)
    return Finding(name, "odd", detail, "free some, or choose another disk: TMPDIR, `ray start --temp-dir`, run.root")


def shared_memory(path: Path) -> Finding:
    """Ray's object store and NCCL live in shared memory; a container's default of 64 MiB is too little."""
    if not path.is_dir():
        return Finding("shared memory", "broken", f"{path} is not there", f"mount a tmpfs at {path}")
    total = shutil.disk_usage(path).total
    detail = f"{format_bytes(total)} at {path}"
    if total < SHM_MIN_BYTES:
        remedy = "docker run --shm-size=8g, or on Kubernetes an emptyDir volume with medium: Memory"
        return Finding("shared memory", "odd", detail, remedy)
    return Finding("shared memory", "ok", detail)


def cpu_limit(root: Path) -> float | None:
    """CPUs that the control group allows, or None."""
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if not period:
        quota = _text(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _text(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
