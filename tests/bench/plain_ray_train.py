"""The peer of `recovery.py`: a plain Ray Train script, torch DDP and `ray.train.report`, with Ray's defaults.

    python -m tests.bench.plain_ray_train FOLDER STEPS

Every rank appends its pid to `FOLDER/ranks.jsonl`, rank 0 each step to `FOLDER/steps.jsonl`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

STEP_S = 0.3
CHECKPOINT_EVERY = 5


def add_line(path: Path, **fields: Any) -> None:
    """Append a JSON line."""
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time(), **fields}) + "\n")


def train_worker(settings: dict[str, Any]) -> None:
    """One rank."""
    import torch

    folder, rank = Path(settings["folder"]), train.get_context().get_world_rank()
    add_line(folder / "ranks.jsonl", rank=rank, pid=os.getpid())
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, found = 1, train.get_checkpoint()
    if found is not None:
        with found.as_directory() as where:
            state = torch.load(Path(where) / "state.pt", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, settings["steps"] + 1):
        time.sleep(STEP_S)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if rank == 0:
            add_line(folder / "steps.jsonl", step=step)
        if rank == 1 and step == settings["fails_at"] and not (folder / "failed").exists():
            (folder / "failed").touch()
            raise ZeroDivisionError("a bug that shows once")
        if step % CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as where:
                if rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(where) / "state.pt")
                checkpoint = Checkpoint.from_directory(where) if rank == 0 else None
                train.report({"step": step}, checkpoint=checkpoint)


def main() -> None:
    """Connect to RAY_ADDRESS and train on two workers."""
    folder, steps, fails_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ray.init(logging_level="warning")
    TorchTrainer(
        train_worker,
        train_loop_config={"folder": str(folder), "steps": steps, "fails_at": fails_at},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="plain", storage_path=str(folder / "store"), failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()


if __name__ == "__main__":
    main()
