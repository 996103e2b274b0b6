"""Pinned host memory on a machine with a GPU: exact, fast to copy, and given back. Not collected by pytest.

    python tests/cuda/memory_check.py [GiB]

Prints one line a check and exits 1 if any failed. Oracles: CUDA's own answer whether memory is pinned, the kernel's
record of what is resident, and the link's speed.
"""

from __future__ import annotations

import gc
import re
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from raydz.errors import OffloadError
from raydz.offload.memory import HostMemory

GIB = 1 << 30


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def say(name: str, passed: bool, figures: str = "") -> bool:
    print(f"{'ok  ' if passed else 'FAIL'} {name} {figures}", flush=True)
    return passed


def main() -> int:
    size = int(float(sys.argv[1]) * GIB) if len(sys.argv) > 1 else 4 * GIB
    torch.zeros(1).cuda()
    memory, before, good = HostMemory(2 * size), resident_bytes(), True
    start = time.perf_counter()
    tensor = memory.empty(size // 4 + 3, torch.float32)
    taken = time.perf_counter() - start
    good &= say("registered", tensor.is_pinned() and tensor[5:].is_pinned(), f"{taken * GIB / size:.2f} s a GiB")
    held = resident_bytes() - before
    good &= say(
        "exact", abs(held - memory.bytes_held) < 64 << 20, f"{held / GIB:.2f} of {memory.bytes_held / GIB:.2f} GiB"
    )

    device = torch.empty(size // 4, device="cuda")
    for name, to, source in (("to the device", device, tensor[3:]), ("to the host", tensor[3:], device)):
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        to.copy_(source, non_blocking=True)
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
        good &= say(f"asynchronous {name}", launched < taken / 4, f"{size / taken / 1e9:.1f} GB/s")

    memory.free(tensor)
    held = resident_bytes() - before
    good &= say(
        "freed", held < 256 << 20 and memory.bytes_held == 0 and not tensor.is_pinned(), f"{held >> 20} MiB left"
    )
    for _ in range(20):
        again = memory.empty(1 << 24, torch.bfloat16)
        good &= again.is_pinned()
        del again
        gc.collect()
    good &= say("twenty more leak nothing", memory.bytes_held == 0 and resident_bytes() - before < 256 << 20)
    try:
        memory.empty(3 * size, torch.uint8)
        good &= say("refused over the budget", False)
    except OffloadError as error:
        good &= say("refused over the budget", True, str(error).replace("\n", ";"))
    torch.ones(8, device="cuda").sum().item()
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
