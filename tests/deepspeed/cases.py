"""The configurations that DeepSpeed and raydz both train `script.py` with, and how a process runs that script."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("script.py")
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.3, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6}}
CYCLE = {"cycle_min_lr": 0.002, "cycle_max_lr": 0.02, "cycle_first_step_size": 4, "decay_step_size": 2}


def config(stage: int, **sections: Any) -> dict[str, Any]:
    """Two micro-batches of 4 rows on each of 2 ranks, clipped; `sections` replace those given here, None removes."""
    base: dict[str, Any] = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": OPTIMIZER,
        "scheduler": WARMUP,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
    }
    return {name: section for name, section in (base | sections).items() if section is not None}


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    **{f"stage {stage}": (config(stage), []) for stage in range(4)},
    "its own optimizer": (
        config(2, optimizer=None, scheduler=None, gradient_accumulation_steps=1, zero_allow_untested_optimizer=True),
        ["--client_optimizer"],
    ),
    "defaults": (config(1, gradient_clipping=None, scheduler=None), []),
    "one cycle": (config(1, scheduler={"type": "OneCycle", "params": {**CYCLE, "decay_lr_rate": 0.5}}), []),
}


def arguments(name: str, folder: Path) -> list[str]:
    """The script's command line; its JSON is written to `folder`."""
    ds_config, flags = CASES[name]
    file = folder / "ds_config.json"
    file.write_text(json.dumps(ds_config))
    return ["--folder", str(folder), "--deepspeed", "--deepspeed_config", str(file), *flags]


def run_with_its_import_changed(rank: int, world_size: int, folder: str, command_line: list[str]) -> None:
    """Run the script on one rank of a pool, as `python script.py ...` would."""
    changed = Path(folder) / f"changed-{rank}.py"
    changed.write_text(SCRIPT.read_text().replace("import deepspeed\n", "from raydz import deepspeed\n"))
    before = sys.argv
    sys.argv = [str(changed), *command_line]
    try:
        runpy.run_path(str(changed), run_name="__main__")
    finally:
        sys.argv = before
