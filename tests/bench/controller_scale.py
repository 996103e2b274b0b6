"""What the driver's side costs a step of 1 s, with 8, 64 and 1,024 simulated workers, 8 on a node.

    python tests/bench/controller_scale.py                  # a table
    python tests/bench/controller_scale.py --json           # one JSON line a world size
    python tests/bench/controller_scale.py --only board     # without a Ray cluster

CPU seconds, by part: `board_cpu_s` the Board class in this process, over one second of beats, looks and steps;
`actor_cpu_s` the same through a real actor, its process and the driver's together, sent by another process;
`policy_cpu_s` a decision after a failure with 100 before it (once a failure, not once a step); `reduce_cpu_s` the
step's figures on rank 0; `manifest_cpu_s` the receipts of one checkpoint joined and encoded, `manifest_step_cpu_s` its
share of one of 50 steps. Over 1 s: `driver_share` (board and driver), `step_share` (in the way of training),
`save_share` (rank 0's thread behind training). Each should stay below 0.01.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from raydz.checkpoint import DataFile
from raydz.checkpoint.data_file import CHUNK_BYTES, plan_file
from raydz.checkpoint.receipts import build_manifest, decode_receipts, receipt_of
from raydz.config.cluster import FailureConfig
from raydz.orchestrate.beats import post_every_s
from raydz.orchestrate.board import _LONGEST_WAIT_S as LONGEST_WAIT_S
from raydz.orchestrate.board import Beat, Board, new_board
from raydz.orchestrate.failures import Failure, Kind
from raydz.orchestrate.place import Place
from raydz.orchestrate.policy import decide
from raydz.orchestrate.watchdog import is_overdue
from raydz.tracking import METRICS, reduce_over_ranks
from tests.bench.checkpoint_scale import SHAPES, flat_groups, layouts_of, pieces_of

WORLD_SIZES = (8, 64, 1024)
RANKS_A_NODE = 8
LOOKS_A_SECOND, STOP_LOOKS_A_SECOND, STEPS_A_SECOND = 1, 2, 1
CHECKPOINT_EVERY = 50
PARTS = ("board", "actor", "policy", "reduce", "manifest")
Batch = list[tuple[Beat, float]]


def batches_of(world_size: int, seconds: int) -> tuple[list[Batch], float]:
    """What all nodes post in so many seconds, and how often one does."""
    local = min(RANKS_A_NODE, world_size)
    every_s = post_every_s(Place(0, world_size, 0, local))
    num_nodes = world_size // local
    batches = []
    for index in range(round(num_nodes / every_s * seconds)):
        first = index % num_nodes * local
        batches.append(
            [(Beat(r, 1000 + r, "f" * 56, index, index, "gather blocks.1"), 0.3) for r in range(first, first + local)]
        )
    return batches, every_s


def median_cpu_s(work: Callable[[], Any], repeats: int = 7) -> float:
    """CPU seconds of this thread, median after one warm-up."""
    work()
    taken = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return statistics.median(taken)


def board_cpu_s(world_size: int) -> float:
    """One second of a board's life, the calls alone."""
    board, config = Board(), FailureConfig()
    seconds = 10
    batches, every_s = batches_of(world_size, seconds)

    def live() -> None:
        for batch in batches:
            board.post_beats(batch, every_s)
        for step in range(seconds * STEPS_A_SECOND):
            board.post_step(step)
        for _ in range(seconds * LOOKS_A_SECOND):
            is_overdue(*board.glance(), config)
        for _ in range(seconds * STOP_LOOKS_A_SECOND):
            board.stop_reason()

    return median_cpu_s(live) / seconds


def actor_cpu_s(world_size: int, seconds: int) -> float:
    """One second of a real board's life: its process, and the driver that looks at it."""
    import psutil
    import ray

    board = new_board()

    @ray.remote(num_cpus=0)
    class Workers:
        """Stands for all workers; its own CPU time is theirs."""

        def post(self, board: Any, batches: list[Batch], every_s: float, steps: int, waits: int) -> None:
            number = ray.get(board.next_view.remote(-1)).order.number
            calls = [board.relay.remote(number, "post_beats", batch, every_s) for batch in batches]
            calls += [board.relay.remote(number, "post_step", step) for step in range(steps)]
            calls += [board.stop_reason.remote() for _ in range(2 * steps)]
            calls += [board.next_view.remote(-1) for _ in range(waits)]
            ray.get(calls)

    workers, config = Workers.remote(), FailureConfig()
    batches, every_s = batches_of(world_size, seconds)
    waits = round(world_size * seconds / LONGEST_WAIT_S)  # every worker has one call waiting for news
    ray.get(workers.post.remote(board, batches[:2], every_s, 2, 2))
    process = psutil.Process(ray.get(_pid_of(board)))

    def spent() -> float:
        times = process.cpu_times()
        return times.user + times.system

    before, driver_before = spent(), time.process_time()
    done = workers.post.remote(board, batches, every_s, seconds * STEPS_A_SECOND, waits)
    for _ in range(seconds * LOOKS_A_SECOND):
        is_overdue(*ray.get(board.glance.remote()), config)
    ray.get(done)
    total = spent() - before + time.process_time() - driver_before
    ray.kill(board)
    ray.kill(workers)
    return total / seconds


def _pid_of(actor: Any) -> Any:
    return actor.__ray_call__.remote(lambda self: os.getpid())


def policy_cpu_s() -> float:
    """A decision after the last of 100 failures."""
    config = FailureConfig(max_failures=1000)
    failures = [Failure(Kind.KILLED, 10.0 * n, n, 0, "a worker died") for n in range(100)]
    return median_cpu_s(lambda: decide(failures, config))


def reduce_cpu_s(world_size: int) -> float:
    """From the gathered tensor to the step's figures, on one rank."""
    sent = [row.name for row in METRICS.values() if row.reduce != "rank0"]
    local = {name: random.random() for name in sent if name != "step_time_max_s"}
    everyone = torch.rand(world_size, 2 * len(sent), dtype=torch.float64) + 0.5
    return median_cpu_s(lambda: reduce_over_ranks(local, lambda mine: everyone.tolist()))


def manifest_cpu_s(world_size: int, shape: str) -> float:
    """The receipts of all ranks joined and encoded, as rank 0 does behind training."""
    layouts = layouts_of(flat_groups(SHAPES[shape]), world_size)
    receipts = []
    for rank in range(world_size):
        plan = plan_file(list(pieces_of(layouts, rank)))
        sums = tuple(range(-(-plan.total_bytes // CHUNK_BYTES)))
        receipts.append(json.dumps(receipt_of(plan, DataFile(f"{rank}.st", plan.total_bytes, CHUNK_BYTES, sums, 7))))

    def join() -> None:
        manifest = build_manifest(decode_receipts(receipts), step=1, attempt="0123abcd", aliases={}, state={})
        manifest.check_coverage("here")
        manifest.to_bytes()

    return median_cpu_s(join, repeats=3)


def measure(world_size: int, parts: list[str], options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    if "board" in parts:
        figures["board_cpu_s"] = board_cpu_s(world_size)
    if "actor" in parts:
        figures["actor_cpu_s"] = actor_cpu_s(world_size, seconds=10 if options.quick else 40)
    if "policy" in parts:
        figures["policy_cpu_s"] = policy_cpu_s()
    if "reduce" in parts:
        figures["reduce_cpu_s"] = reduce_cpu_s(world_size)
    if "manifest" in parts:
        figures["manifest_cpu_s"] = manifest_cpu_s(world_size, "tiny" if options.quick else options.shape)
        figures["manifest_step_cpu_s"] = figures["manifest_cpu_s"] / CHECKPOINT_EVERY
    driver = figures.get("actor_cpu_s", figures.get("board_cpu_s"))
    shares = {"driver": driver, "step": figures.get("reduce_cpu_s"), "save": figures.get("manifest_step_cpu_s")}
    figures |= {f"{name}_share": value for name, value in shares.items() if value is not None}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    parser.add_argument("--ranks", type=int, help="one world size in place of 8, 64, 1024")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="model of the simulated checkpoint")
    parser.add_argument("--quick", action="store_true", help="a small model, fewer calls")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts = [part for part in PARTS if part in options.only.split(",")]
    cluster = None
    if "actor" in parts:
        import ray

        from tests.support.ray_cluster import start_cluster, stop_cluster

        cluster = start_cluster(2)
        os.environ.update(cluster.env)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        for world_size in [options.ranks] if options.ranks else WORLD_SIZES:
            show(world_size, measure(world_size, parts, options), options.json)
    finally:
        if cluster is not None:
            ray.shutdown()
            stop_cluster(cluster)
    return 0


def show(world_size: int, figures: dict[str, float], as_json: bool) -> None:
    if as_json:
        line = {"bench": "controller_scale", "system": "raydz", "variant": f"{world_size} workers", "device": "cpu",
                "ranks": world_size, "metrics": figures, "note": "CPU seconds of a 1 s step"}  # fmt: skip
        print(json.dumps(line), flush=True)
        return
    text = "  ".join(
        f"{name} {value:.3%}" if "share" in name else f"{name} {value:.6f}" for name, value in figures.items()
    )
    print(f"{world_size:>5} workers  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
