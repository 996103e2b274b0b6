"""Files behind the caller's back, beside `fio` at the same block size and depth; an optimizer step through a disk.

    python tests/bench/nvme.py --quick                 # a table, under a minute on two cores
    python tests/bench/nvme.py --path /mnt/nvme --json # one JSON line a result

Reads and writes: fio (io_uring, O_DIRECT, registered buffers and files) and raydz in turn on the same file, so many
pairs of runs; medians, and the median of the pairs' ratios, since a disk that others share changes every second.

The optimizer: AdamW over units that all live on the disk (12 bytes a parameter, fp32), against the larger of what the
same update takes in host memory and what the same bytes take to be read and written, half and half, without it: by fio
or by raydz's own queue, whichever is faster. Rounds of them take turns, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from raydz.offload.aio import AioOptions, AioQueue, SwapFile
from raydz.offload.folder import SwapFolder
from raydz.offload.memory import HostMemory
from raydz.offload.nvme import NvmeOptions, NvmeTier
from raydz.offload.tiers import HostTier, Tier, UnitShape
from raydz.ops import adamw_step, native

MIB = 1 << 20
SLOT_BYTES = 64 * MIB
STATES = {"home": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def fio(path: str, kind: str, num_bytes: int, arguments: argparse.Namespace) -> float:
    """GB/s; `rw` reads one half of the bytes and writes the other."""
    command = ["fio", "--name=bench", f"--filename={path}", f"--rw={kind}", f"--size={num_bytes}", "--direct=1"]
    command += ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", "--allow_file_create=0"]
    command += [f"--bs={arguments.block}", f"--iodepth={arguments.depth}", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"fio: {done.stderr or done.stdout}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    seconds = max(job[way]["runtime"] for way in ("read", "write")) / 1e3
    return sum(job[way]["io_bytes"] for way in ("read", "write")) / seconds / 1e9


@contextmanager
def raydz_queue(path: str, num_bytes: int, aio: AioOptions) -> Iterator[Callable[[str], float]]:
    """What moves the whole file once, in requests as large as the tier's, and returns GB/s."""
    memory, file = HostMemory(4 * SLOT_BYTES, pinned=False), SwapFile(path)
    file.allocate(num_bytes)
    slots = [memory.empty(SLOT_BYTES, torch.uint8).fill_(index + 1) for index in range(2)]
    queue = AioQueue(aio, [file], slots)

    def move(kind: str) -> float:
        begin = time.perf_counter()
        transfers = []
        for turn, start in enumerate(range(0, num_bytes, SLOT_BYTES)):
            is_write = kind == "write" or (kind == "rw" and turn % 2 == 1)
            transfers.append((queue.write if is_write else queue.read)(file, start, slots[turn % 2]))
        for transfer in transfers:
            transfer.wait()
        return num_bytes / (time.perf_counter() - begin) / 1e9

    try:
        yield move
    finally:
        queue.close()
        file.close()
        memory.close()


def spread(name: str, values: list[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def compare(folder: str, arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """fio's and raydz's rows."""
    num_bytes, path = arguments.mib * MIB // SLOT_BYTES * SLOT_BYTES, f"{folder}/file"
    aio = AioOptions(arguments.block, arguments.depth, use_io_uring=not arguments.no_io_uring)
    speeds: dict[tuple[str, str], list[float]] = {}
    with raydz_queue(path, num_bytes, aio) as move:
        move("write")  # blocks that were never written cost another way
        for kind in ("read", "write"):
            for _ in range(arguments.pairs):
                if shutil.which("fio"):
                    speeds.setdefault(("fio", kind), []).append(fio(path, kind, num_bytes, arguments))
                speeds.setdefault(("raydz", kind), []).append(move(kind))
    rows: dict[str, dict[str, float]] = {"fio": {}, "raydz": {}}
    for (system, kind), found in speeds.items():
        rows[system] |= spread(f"{kind}_gbytes_per_s", found)
        if system == "raydz" and ("fio", kind) in speeds:
            pairs = zip(found, speeds["fio", kind], strict=True)
            rows[system] |= spread(f"{kind}_of_fio", [ours / theirs for ours, theirs in pairs])
    for system, metrics in rows.items():
        note = (
            f"{arguments.pairs} pairs of {num_bytes / 1e9:.2f} GB, blocks of {arguments.block}, {arguments.depth} deep"
        )
        yield row(system, "file", metrics, note)


def train_step(tier: Tier, gradient: torch.Tensor, numels: list[int], step: int, threads: int) -> float:
    """Seconds of one AdamW step over all units."""
    begin = time.perf_counter()
    tier.begin(range(len(numels)))
    for index, numel in enumerate(numels):
        held = tier.fetch(index)
        adamw_step(
            held["home"], gradient[:numel], held["exp_avg"], held["exp_avg_sq"], step=step, threads=threads, lr=1e-4,
            beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
        )  # fmt: skip
        tier.write_back(index)
    tier.finish()
    return time.perf_counter() - begin


def optimizer(folder: str, arguments: argparse.Namespace) -> dict[str, object]:
    """A step through the disk, over the larger of its two parts."""
    numels = [arguments.unit_params] * arguments.units
    num_bytes = 2 * 12 * sum(numels) // MIB * MIB
    units = [UnitShape(index, 0, numel, STATES, f"unit {index}") for index, numel in enumerate(numels)]
    memory = HostMemory(1 << 40, pinned=False)
    gradient = torch.randn(max(numels)).bfloat16()
    aio = AioOptions(arguments.block, arguments.depth, use_io_uring=not arguments.no_io_uring)
    host = HostTier(units, memory)
    disk = NvmeTier(units, memory, SwapFolder(folder), NvmeOptions(slots=arguments.slots, cache_bytes=0, aio=aio))
    for step, tier in [(1, host), (2, host), (1, disk), (2, disk)]:
        train_step(tier, gradient, numels, step, arguments.threads)
    taken: dict[str, list[float]] = {"step_s": [], "compute_s": [], "disk_s": [], "of_floor": []}
    with raydz_queue(f"{folder}/floor", num_bytes // 2 // SLOT_BYTES * SLOT_BYTES, aio) as move:
        move("write")
        for step in range(3, 3 + arguments.pairs):
            speed = move("rw")
            if shutil.which("fio"):
                speed = max(speed, fio(f"{folder}/floor", "rw", num_bytes // 2, arguments))
            before = disk.bytes_read + disk.bytes_written
            taken["step_s"].append(train_step(disk, gradient, numels, step, arguments.threads))
            taken["disk_s"].append((disk.bytes_read + disk.bytes_written - before) / speed / 1e9)
            taken["compute_s"].append(train_step(host, gradient, numels, step, arguments.threads))
            floor = max(taken["compute_s"][-1], taken["disk_s"][-1])
            taken["of_floor"].append(taken["step_s"][-1] / floor)
    metrics = {key: value for name, values in taken.items() for key, value in spread(name, values).items()}
    disk.close()
    host.close()
    note = f"{sum(numels) / 1e6:.0f}M parameters, {arguments.slots} slots, {arguments.pairs} rounds"
    return row("raydz", "optimizer", metrics, note)


def row(system: str, variant: str, metrics: dict[str, float], note: str) -> dict[str, object]:
    line = {"bench": "nvme", "system": system, "variant": variant, "device": "cpu", "ranks": 1}
    return {**line, "metrics": metrics, "note": note} if metrics else {**line, "note": "not installed"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--ranks", type=int, choices=[1], default=1)
    parser.add_argument("--path", help="a folder on the disk; default: the one for temporary files")
    parser.add_argument("--only", default="file,optimizer", help="variants, with commas")
    parser.add_argument("--block", type=int, default=MIB)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of the update")
    parser.add_argument("--no-io-uring", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--mib", type=int, help="of the file")
    parser.add_argument("--units", type=int)
    parser.add_argument("--unit-params", type=int, default=4 * MIB)
    arguments = parser.parse_args()
    arguments.pairs = arguments.pairs or (3 if arguments.quick else 9)
    arguments.mib = arguments.mib or (512 if arguments.quick else 2048)
    arguments.units = arguments.units or (8 if arguments.quick else 24)
    return arguments


def main() -> None:
    arguments = parse()
    native.require()
    folder = tempfile.mkdtemp(prefix="raydz-bench-", dir=arguments.path)
    try:
        wanted = arguments.only.split(",")
        rows = compare(folder, arguments) if "file" in wanted else iter(())
        for result in rows:
            show(result, arguments)
        if "optimizer" in wanted:
            show(optimizer(folder, arguments), arguments)
    finally:
        shutil.rmtree(folder)


def show(result: dict[str, object], arguments: argparse.Namespace) -> None:
    if arguments.json:
        return print(json.dumps(result), flush=True)
    metrics = result.get("metrics")
    print("{system:<6} {variant:<10} {note}".format(**result), flush=True)
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if not name.endswith(("_min", "_max")):
            print(f"    {name:<20} {value:8.3f}  ({metrics[name + '_min']:.3f}-{metrics[name + '_max']:.3f})")


if __name__ == "__main__":
    main()
