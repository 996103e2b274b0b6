"""Run `script.py` under DeepSpeed itself and print its numbers, as `recorded.json` holds them.

    DS_ACCELERATOR=cpu DS_SKIP_CUDA_CHECK=1 OMP_NUM_THREADS=1 python tests/deepspeed/record.py > recorded.json

Needs DeepSpeed 0.19 (a plain `DS_BUILD_OPS=0` wheel is enough), which raydz's own environment has not. `schedules` in
the output are the learning rates (and first betas) that its scheduler classes give for 16 optimizer steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.deepspeed.cases import CASES, SCRIPT, arguments

CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.7, "cycle_first_step_size": 4}
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "range test": ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4}),
    "range test in stairs": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.5}
        | {"lr_range_test_staircase": True},
    ),
    "range test by default": ("LRRangeTest", {}),
    "cycle": ("OneCycle", CYCLE),
    "cycle with decay": (
        "OneCycle",
        {**CYCLE, "cycle_second_step_size": 6, "decay_lr_rate": 0.3, "decay_step_size": 2}
        | {"cycle_min_mom": 0.85, "cycle_max_mom": 0.95, "decay_mom_rate": 0.01},
    ),
    "cycle in stairs": (
        "OneCycle",
        {**CYCLE, "cycle_second_step_size": 7, "cycle_first_stair_count": 2, "cycle_second_stair_count": 3},
    ),
    "cycle of the rate alone": ("OneCycle", {**CYCLE, "cycle_momentum": False, "cycle_second_step_size": 0}),
    "cycle with decay of the rate alone": ("OneCycle", {**CYCLE, "decay_lr_rate": 0.3, "decay_step_size": 2}),
    "warm-up": ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": 6}),
    "warm-up and decay": ("WarmupDecayLR", {"total_num_steps": 12, "warmup_max_lr": 0.2, "warmup_num_steps": 5}),
    "warm-up and cosine": (
        "WarmupCosineLR",
        {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}
        | {"warmup_type": "linear"},
    ),
}
BASE_LR, STEPS = 0.4, 16


def record_schedule(name: str, params: dict[str, Any]) -> dict[str, list[Any]]:
    """What a step of the optimizer would use, before the scheduler is stepped after it."""
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=BASE_LR)
    scheduler = getattr(lr_schedules, name)(optimizer, **params)
    rates, betas = [], []
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        betas.append(list(optimizer.param_groups[0]["betas"]))
        scheduler.step()
    return {"rates": rates, "betas": betas}


def record_case(name: str) -> list[dict[str, Any]]:
    """The results of both ranks."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
        command = [sys.executable, *launcher, *arguments(name, Path(folder))]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return [json.loads(Path(folder, f"result-{rank}.json").read_text()) for rank in range(2)]


def as_text(recorded: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for each entry, numbers to nine digits."""

    def shorter(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.9g}")
        if isinstance(value, dict):
            return {key: shorter(item) for key, item in value.items()}
        return [shorter(item) for item in value] if isinstance(value, list) else value

    sections = []
    for name, entries in recorded.items():
        lines = (f"  {json.dumps(label)}: {json.dumps(shorter(entry))}" for label, entry in entries.items())
        sections.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}"


if __name__ == "__main__":
    from contextlib import redirect_stdout

    with redirect_stdout(sys.stderr):  # DeepSpeed talks
        schedules = {label: record_schedule(*spec) for label, spec in SCHEDULES.items()}
        losses = {name: record_case(name) for name in CASES}
    print(as_text({"schedules": schedules, "script": losses}))
