"""Tiny training runs: their configuration, how ranks run them, and what their journals say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

WORDS = ("red", "green", "blue", "house", "tree", "runs", "sleeps", "over", "under", "the", "a", "old", "new", "river")


def write_text(path: Path, num_lines: int = 120) -> Path:
    """A text of short lines of different lengths, the same every time."""
    lines = (" ".join(WORDS[(i * j * 7 + j) % len(WORDS)] for j in range(3 + i % 9)) for i in range(num_lines))
    path.write_text("\n".join(f"{line} {i}" for i, line in enumerate(lines)))
    return path


def run_config(folder: Path, **sections: Any) -> dict[str, Any]:
    """A run that takes about a second; `sections` are merged in, section by section."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    base: dict[str, Any] = {
        "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "data": {"sources": [str(text)], "sequence_length": 32, "tokenizer": {"vocab_size": 300}, "eval_fraction": 0.1},
        "train": {"steps": 6, "eval_every": 0, "device": "cpu", "threads": 1},
        "train_batch_size": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}},
        "checkpoint": {"every": 2},
        "run": {"name": "a", "root": str(folder / "runs")},
        "tracking": {"mlflow": False},
    }
    for name, value in deepcopy(sections).items():
        base[name] = base[name] | value if isinstance(base.get(name), dict) and isinstance(value, dict) else value
    return base


def run(config: dict, **hooks: Any):
    """Train in this process; the Result."""
    return run_on_rank(0, 1, config, hooks)


def run_on_rank(rank: int, world_size: int, config: dict, hooks: dict | None = None):
    """Train on one rank of a pool; the Result."""
    import os

    from raydz.config import load, resolve_paths
    from raydz.dist import init_world
    from raydz.train import run_training

    loaded = resolve_paths(load(config), os.getcwd())
    world = init_world("cpu", threads=1)
    return run_training(loaded, world, **(hooks or {}))


def try_on_rank(rank: int, world_size: int, config: dict, hooks: dict | None = None) -> tuple[str, str]:
    """Class and text of what training raises, on one rank; the Result's status where it doesn't."""
    try:
        return "Result", run_on_rank(rank, world_size, config, hooks).status
    except Exception as error:
        return type(error).__name__, str(error)


class Interrupted(Exception):
    """What a test's loss function raises."""


class InterruptingLoss:
    """The usual loss, which gives up in the forward pass number `after` + 1 of its process."""

    def __init__(self, after: int) -> None:
        self.after, self.calls = after, 0

    def __call__(self, model, batch):
        from raydz.models import causal_lm_loss

        self.calls += 1
        if self.calls > self.after:
            raise Interrupted
        return causal_lm_loss(model, batch)


# -- what a run leaves -------------------------------------------------------------------------------------------------


def journal(folder: Path, name: str = "a") -> list[dict[str, Any]]:
    """The lines of a run's journal."""
    path = folder / "runs" / name / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def column(folder: Path, key: str, name: str = "a") -> list[Any]:
    """One metric of all steps, which are numbered from 1 without a gap."""
    lines = journal(folder, name)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line.get(key) for line in lines]


def manifests(folder: Path, name: str = "a") -> list[str]:
    """Folders of a run's committed checkpoints."""
    return sorted(path.parent.name for path in (folder / "runs" / name / "checkpoints").glob("*/manifest.json"))


# -- other processes ---------------------------------------------------------------------------------------------------


def write_config(folder: Path, config: dict) -> Path:
    """The configuration as a file."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(folder: Path, config: dict, *arguments: str, ranks: int = 1) -> list[str]:
    """`python -m raydz.train`, under torchrun where there are ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [
        sys.executable, *launcher, "-m", "raydz.train", "--config", str(write_config(folder, config)), *arguments,
    ]  # fmt: skip


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without a launcher's variables or AWS credentials."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("AWS_")}
    here = str(Path(__file__).parents[2])
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": here} | changes


def train_by_command(
    folder: Path, config: dict, *arguments: str, ranks: int = 1, limit_s: float = 60, **env: str
) -> subprocess.CompletedProcess:
    """Run it to its end and keep what it said."""
    return subprocess.run(
        command(folder, config, *arguments, ranks=ranks), cwd=folder, env=environment(**env), capture_output=True,
        text=True, timeout=limit_s,
    )  # fmt: skip
