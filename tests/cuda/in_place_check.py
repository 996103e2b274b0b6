"""A restart in place on GPUs, without Ray: not collected by pytest.

    python tests/cuda/in_place_check.py

A process that has imported torch and raydz but opened no CUDA forks one rank a GPU (NCCL where there are several); each
trains, keeps snapshots in shared memory and is killed by SIGKILL after step 7; new forks take the snapshot of step 6
back and train on. The losses must be the uninterrupted ones, bit for bit. Prints them and the seconds of each phase,
and exits 1 if they differ.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as the zygote has it

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from raydz.checkpoint.memory import MemorySnapshots
from raydz.config import load_engine
from raydz.dist import init_world
from raydz.engine import initialize
from raydz.models import Decoder, DecoderShape
from raydz.storage.memory_slot import MemorySlot, new_memory

STEPS, EVERY, KILL_AFTER = 10, 3, 7
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


def rank_main(rank: int, world_size: int, port: int, fds: list[int], killed_after: int | None, out: int) -> None:
    """One rank of one round; writes a JSON line a fact into `out`."""
    began = time.time()
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }  # fmt: skip

    def tell(**facts: object) -> None:
        os.write(out, (json.dumps({"rank": rank, **facts}) + "\n").encode())

    torch.cuda.set_device(rank)
    if world_size > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    world = init_world("cuda")
    shape = DecoderShape(8000, 1024, 8, 16, 16, 2816)
    with torch.device("meta"):
        model = Decoder(shape)
    torch.manual_seed(0)
    engine = initialize(model, load_engine(CONFIG), device="cuda")
    snapshots = MemorySnapshots([MemorySlot(fd) for fd in fds], rank, world_size, world.device)
    usable, first = snapshots.usable(engine.held_pieces()), 1
    if usable:
        started = time.time()
        first = engine.restore(snapshots, usable[-1])["step"] + 1
        torch.cuda.synchronize()
        tell(restored=first - 1, restore_s=time.time() - started, ready_s=time.time() - began)
    for step in range(first, STEPS + 1):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(0, 8000, (4, 513), generator=generator).cuda()
        logits = engine(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        tell(step=step, loss=loss.item(), blocked_s=engine.take_save_blocked_s())
        if killed_after is not None and step % EVERY == 0:
            engine.snapshot(snapshots, step=step, state={"step": step})
        if step == killed_after:
            snapshots.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def run_round(world_size: int, port: int, fds: list[list[int]], killed_after: int | None) -> list[dict]:
    """Fork all ranks, wait for their ends, and give what they told."""
    reader, writer = os.pipe()
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            try:
                rank_main(rank, world_size, port, fds[rank], killed_after, writer)
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(1)
        pids.append(pid)
    os.close(writer)
    with os.fdopen(reader) as told:
        lines = [json.loads(line) for line in told]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print("exit codes", codes, flush=True)
    return lines


def main() -> int:
    world_size = torch.cuda.device_count()
    assert not torch.cuda.is_initialized(), "counting GPUs opened CUDA: forks would fail"
    fds = [[new_memory(f"check-{rank}-{slot}") for slot in range(2)] for rank in range(world_size)]
    straight = run_round(world_size, 29611, [[] for _ in fds], None)
    before = run_round(world_size, 29612, fds, KILL_AFTER)
    started = time.time()
    after = run_round(world_size, 29613, fds, None)
    print(f"second round: {time.time() - started:.2f} s in all")
    for line in [line for line in after if "restored" in line]:
        print(line)
    slots = sum(os.fstat(fd).st_size for rank in fds for fd in rank)
    print(f"{world_size} GPUs, {slots / 1e9:.2f} GB in memory, blocked", max(x.get("blocked_s", 0) for x in before))
    expected = {(line["rank"], line["step"]): line["loss"] for line in straight if "step" in line}
    found = {(line["rank"], line["step"]): line["loss"] for line in (*before, *after) if "step" in line}
    is_same = found == expected and len(found) == world_size * STEPS
    resumed = {line["restored"] for line in after if "restored" in line}
    print("losses", "equal" if is_same else f"differ: {expected} {found}", "resumed after", resumed)
    return 0 if is_same and resumed == {KILL_AFTER - KILL_AFTER % EVERY} else 1


if __name__ == "__main__":
    sys.exit(main())
