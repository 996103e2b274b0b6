"""Peaks of memory: of the device through torch's allocator, of the host through the kernel's own record; what is free.

Layer 3. `train/loop.py` calls `reset_peaks` before and `read_peaks` after a step; the names are those of
`tracking.metrics`. Both are figures of this process alone.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"  # Linux, Documentation/filesystems/proc.rst


def reset_host_peak() -> bool:
    """Start a new peak at the memory that is resident now.

    Returns:
        False where the kernel does not permit it (no /proc, a locked-down container): the peak is then that of the
        whole life of the process, still true but coarser.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS)
    except OSError:
        return False
    return True


def host_memory_peak_bytes() -> int:
    """Peak resident memory of this process since the last successful `reset_host_peak`.

    Units: bytes; pages shared with other processes (a mapped file, pinned staging) count in each of them.
    """
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc on this system: the next source counts the same thing and cannot be reset
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_peak_bytes() -> int:
    """Peak of device memory held by tensors since the last reset; without a GPU the device is the CPU: host peak.

    Units: bytes, what tensors occupied (`max_memory_allocated`), not what the caching allocator held in reserve.
    """
    if not _uses_cuda():
        return host_memory_peak_bytes()
    import torch

    return torch.cuda.max_memory_allocated()


def reset_peaks() -> None:
    """Start new peaks of host and device, so that the next `read_peaks` speaks of what comes after."""
    reset_host_peak()
    if _uses_cuda():
        import torch

        torch.cuda.reset_peak_memory_stats()


def read_peaks() -> dict[str, float]:
    """Both peaks under their metric names."""
    host = float(host_memory_peak_bytes())  # read once: without a GPU the two must agree
    device = float(memory_peak_bytes()) if _uses_cuda() else host
    return {"memory_peak_bytes": device, "host_memory_peak_bytes": host}


def _uses_cuda() -> bool:
    """Whether this process computes on a GPU; asking must not create a CUDA context (hundreds of MiB) by itself."""
    if "torch" not in sys.modules:
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized()


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Total and available bytes of the host, by /proc/meminfo and by the control group's limit.

    Raises:
        OSError: this system has no /proc/meminfo.
    """
    text = (root / "proc/meminfo").read_text()
    fields = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    total, available = fields["MemTotal"], fields["MemAvailable"]
    for folder, limit_name, used_name in (
        (root / "sys/fs/cgroup", "memory.max", "memory.current"),
        (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < total:
            total, available = limit, min(available, max(0, limit - used))
    return total, available


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
