"""Small runs on real text, and what to read of them afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def small_config(root: Path, name: str, **sections: Any) -> dict[str, Any]:
    """A tiny decoder on the shipped text, two ranks, ZeRO-3; `sections` are merged over it."""
    config: dict[str, Any] = {
        "run": {"name": name, "root": str(root)},
        "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "data": {"sources": ["sample:wordnet"], "sequence_length": 32, "tokenizer": {"vocab_size": 300}},
        "train": {"steps": 20, "eval_every": 10, "eval_rows": 8, "threads": 1, "device": "cpu"},
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 3},
        "checkpoint": {"every": 5},
        "scaling": {"num_workers": 2},
        "tracking": {"mlflow": False},
    }
    for key, value in sections.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    return config


def start_driver(options: dict[str, Any], folder: Path, env: dict[str, str]) -> subprocess.Popen:
    """`tests.support.fit_driver` in a process of its own; its output goes to `<folder>/driver.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "options.json"
    path.write_text(json.dumps({"result": str(folder / "result.json"), **options}))
    with (folder / "driver.log").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.fit_driver", str(path)],
            env={**env, "PYTHONPATH": str(REPOSITORY)},
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def run_torchrun(config: dict[str, Any], folder: Path, ranks: int) -> subprocess.CompletedProcess:
    """The same run without Ray."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    return subprocess.run(
        [*command, "-m", "raydz.train", "--config", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file; [] while it does not exist, without a line that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def losses(root: Path, name: str) -> dict[int, float]:
    """Loss by step, from the journal; fails if a step is there twice."""
    lines = read_lines(root / name / "journal.jsonl")
    assert len({line["step"] for line in lines}) == len(lines), "a step was recorded twice"
    return {line["step"]: line["loss"] for line in lines}


def wait_for_step(root: Path, name: str, step: int, process, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        lines = read_lines(root / name / "journal.jsonl")
        if lines and lines[-1]["step"] >= step:
            return
        assert process.poll() is None, "the driver ended early"
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


def wait_for_checkpoint(root: Path, name: str, step: int, process, limit_s: float = 120) -> Path:
    """Folder of the step's checkpoint, once it is committed: saves go on while training does."""
    folder, deadline = root / name / "checkpoints" / f"step-{step:010d}", time.monotonic() + limit_s
    while not (folder / "manifest.json").exists():
        assert time.monotonic() < deadline, f"the checkpoint of step {step} was not committed"
        assert process.poll() is None, "the driver ended early"
        time.sleep(0.05)
    return folder


def worker_pids(root: Path, name: str) -> list[int]:
    """Pids of the newest attempt's ranks, in rank order."""
    events = [event for event in read_lines(root / name / "events.jsonl") if event["event"] == "ranks"]
    return [int(place.rpartition(":")[2]) for place in events[-1]["processes"]]


def assert_gone(pids: list[int], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError("worker processes outlive the run")
