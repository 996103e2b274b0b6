"""The numerics contract on GPUs, for machines that have some: not collected by pytest, which runs without.

    python tests/cuda/engine_check.py
    torchrun --nproc-per-node 2 tests/cuda/engine_check.py

Prints one line a check and exits 1 if any failed. The oracle is plain torch in fp32 on the CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from raydz.dist import init_world, shutdown_world
from tests.parity.training import Case, Outcome, describe, train_with_engine, train_with_torch

# A GPU adds in another order than the CPU: four AdamW steps at lr 1e-2 turn relative differences of 1e-6 in small
# gradients into at most this much of a weight of magnitude 1.
WEIGHT_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5


def largest_difference(outcome: Outcome, oracle: Outcome) -> tuple[float, float]:
    weights = max(float(np.abs(outcome.weights[name] - oracle.weights[name]).max()) for name in oracle.weights)
    return weights, max(abs(a - b) for a, b in zip(outcome.losses, oracle.losses, strict=True))


def equal_bits(left: Outcome, right: Outcome) -> bool:
    same = all(np.array_equal(left.weights[n].view(np.int32), right.weights[n].view(np.int32)) for n in left.weights)
    return same and left.losses == right.losses


def main() -> int:
    world = init_world("cuda")
    is_first, failed = world.rank == 0, 0

    def run(case: Case) -> Outcome | None:
        return train_with_engine(world.rank, world.world_size, case, device="cuda")

    def tell(passed: bool, text: str) -> None:
        nonlocal failed
        failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {world.world_size} x {text}", flush=True)

    for ordered in (False, True):
        for case in [Case(stage=s, accumulation=a, ordered=ordered) for s in range(4) for a in (1, 3)]:
            outcome = run(case)
            if is_first:
                weights, losses = largest_difference(outcome, train_with_torch(case))
                passed = weights < WEIGHT_TOLERANCE and losses < LOSS_TOLERANCE
                tell(passed, f"{describe(case)}: weights within {weights:.1e}, losses within {losses:.1e} of the CPU")
    for bf16 in (False, True):
        outcomes = [run(Case(stage=s, bf16=bf16, ordered=True)) for s in range(4)]
        layouts = [run(Case(stage=3, bf16=bf16, ordered=True, bucket=50, persistence=0, prefetch=10**9))]
        if is_first:
            same = all(equal_bits(outcomes[0], other) for other in outcomes[1:])
            tell(same, f"stages 0-3 bit-equal, {'bf16' if bf16 else 'fp32'}, ordered collectives")
            tell(equal_bits(outcomes[0], layouts[0]), f"other buckets and prefetch, {'bf16' if bf16 else 'fp32'}")
    shutdown_world()
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
