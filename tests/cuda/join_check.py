"""Uneven inputs and bf16 states on GPUs: not collected by pytest.

    torchrun --nproc-per-node 2 tests/cuda/join_check.py

Ranks with unequally many batches against plain torch on the CPU, at every stage; rounding by chance on a GPU against
the same on the CPU, bit for bit; training with bf16 masters and moments beside that with fp32 ones. Prints one line a
check and exits 1 if any failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from raydz.config import load_engine
from raydz.dist import World, init_world, shutdown_world
from raydz.engine import initialize
from raydz.ops.stochastic import random_words, round_stochastic
from tests.parity.uneven import ROWS, Uneven, batch, loss_of, oracle
from tests.zero.models import Plain
from tests.zero.training import Run, build

# A GPU adds in another order than the CPU: as in engine_check.py.
WEIGHT_TOLERANCE = 1e-4


def check_join(world: World, stage: int) -> str:
    case = Uneven(Run(Plain, stage=stage, accumulation=2), (5, 2))
    config = load_engine(case.run.config() | {"train_batch_size": ROWS * world.world_size * 2})
    engine = initialize(build(case.run), config, device="cuda")
    with engine.join():
        for index in range(case.batches[world.rank]):
            engine.backward(loss_of(engine, batch(world.rank, index).to(world.device), "mean"))
            engine.step()
    steps, weights = engine.global_steps, engine.full_state_dict()
    engine.destroy()
    wanted = oracle(case)[0]
    worst = max(
        (float((weights[n] - torch.from_numpy(w)).abs().max()) for n, w in wanted.items() if weights), default=0
    )
    return "" if steps == case.num_steps and worst <= WEIGHT_TOLERANCE else f"{steps} steps, weights differ by {worst}"


def check_rounding(world: World) -> str:
    source = torch.randn(100_003, generator=torch.Generator().manual_seed(1))
    results = []
    for device in (torch.device("cpu"), world.device):
        out = torch.empty(source.numel(), dtype=torch.bfloat16, device=device)
        round_stochastic(source.to(device), random_words(9, 5, 5 + source.numel(), device), 2, out)
        results.append(out.cpu())
    return "" if torch.equal(*results) else f"{int((results[0] != results[1]).sum())} elements differ"


def losses(world: World, **bf16: bool) -> tuple[list[float], int]:
    """Of 30 steps at stage 3, and the bytes of moments a rank."""
    run = Run(Plain, stage=3)
    engine = initialize(build(run), load_engine(run.config() | {"bf16": {"enabled": True, **bf16}}), device="cuda")
    ids, found = batch(world.rank, 0).to(world.device), []
    for _ in range(30):
        loss = loss_of(engine, ids, "mean")
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    moments = sum(t.numel() * t.element_size() for states in engine.optimizer.states for t in states.values())
    engine.destroy()
    return found, moments


def check_states(world: World) -> str:
    exact, whole = losses(world)
    found, half = losses(world, bf16_optimizer_states=True, bf16_master_weights_and_grads=True)
    worst = max(abs(a / b - 1) for a, b in zip(found, exact, strict=True))
    return "" if 2 * half == whole and worst < 0.03 else f"{half} bytes of {whole}, losses differ by {worst:.3f}"


def main() -> int:
    world, failed = init_world("cuda"), 0
    checks = {f"join, stage {stage}": lambda stage=stage: check_join(world, stage) for stage in range(4)}
    checks |= {"rounding as on the CPU": lambda: check_rounding(world), "bf16 states": lambda: check_states(world)}
    for name, check in checks.items():
        complaint = check()
        failed += bool(complaint)
        if world.rank == 0 or complaint:
            print(f"{'FAILED' if complaint else 'ok'} {name} on rank {world.rank} {complaint}", flush=True)
    shutdown_world()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
