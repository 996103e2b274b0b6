"""On a GPU: optimizer states on a disk give the bits of states in host memory; the disk's speed, and a step's.

    python tests/cuda/nvme_check.py [folder on a disk]

One rank. The host budget is capped, so that only some units stay in memory.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cuda.offload_check import STEPS, bits_of, build, config_of, hosted, train


def on_disk(config: dict, path: str, budget: str) -> dict:
    config = hosted(config, "waiting", device="nvme", nvme_path=path)
    return {**config, "parallel": {**config["parallel"], "host_memory_budget": budget}}


def run(config: dict) -> tuple[list[float], list[bytes], str, float]:
    engine = build(config)
    norms = train(engine, range(1, STEPS + 1))
    engine.optimizer.finish()
    begin = time.perf_counter()
    norms += train(engine, range(STEPS + 1, 2 * STEPS + 1))
    engine.optimizer.finish()
    taken = (time.perf_counter() - begin) / STEPS
    tier = engine.optimizer._tier
    place = " ".join(f"{name} {num_bytes / 2**20:.1f} MiB" for name, num_bytes in tier.bytes_held.items())
    bits = bits_of(engine)
    engine.destroy()
    return norms, bits, place, taken


def main() -> None:
    faults = []
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as path:
        for precision, stage, accumulation in (("fp32", 1, 1), ("bf16", 2, 1), ("fp16", 3, 2), ("bf16 moments", 3, 1)):
            config = config_of(precision, stage, 0.5, accumulation)
            norms, bits, _, host_s = run(hosted(config, "waiting"))
            found_norms, found_bits, place, disk_s = run(on_disk(config, path, "80MiB"))
            is_good = found_norms == norms and found_bits == bits and "disk 0.0" not in place
            what = f"{precision}, stage {stage}, {accumulation} micro-batches"
            print(f"{'ok ' if is_good else 'BAD'} {what}: {place}; a step {host_s:.4f} s, on the disk {disk_s:.4f} s")
            faults += [] if is_good else [what]
    if faults:
        raise SystemExit(f"different: {faults}")
    print(torch.cuda.get_device_name(), "fine")


if __name__ == "__main__":
    main()
