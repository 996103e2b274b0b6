"""Processes that end while threads of raydz are in C++: they end as they were told, with what they had begun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raydz.checkpoint import committed_steps
from raydz.storage.local import LocalStore
from tests.support.runs import REPOSITORY


def run(source: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)], capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip


HOW = """
import sys
def leave():
    if sys.argv[1] == "raise":
        raise SystemExit(7)
"""
MONITORS = (
    HOW
    + """
import torch.distributed as dist
from raydz.dist import monitor
monitor._POLL_S = 0.0
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
monitors = [
    monitor.DivergenceMonitor(store, str(n), 0, 2, limit_s=60.0, waiting=monitor.Waiting(), logs=[]) for n in range(16)
]
leave()
"""
)
ENGINE = (
    HOW
    + """
import time, torch, raydz
from raydz.checkpoint import snapshot
config = {{
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
    "zero_optimization": {{"stage": 2, {offload}}},
}}
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)])
engine = raydz.initialize(model, config, device="cpu")
for _ in range(3):
    engine.backward(engine(torch.ones(1, 512)).sum())
    engine.step()
"""
)
SAVE = (
    ENGINE.format(offload="")
    + """
usual = snapshot.fill_image
def late(plan, image):
    time.sleep(1.0)
    usual(plan, image)
snapshot.fill_image = late
engine.save_checkpoint(sys.argv[2], async_save=True)
leave()
"""
)
OFFLOAD = ENGINE.format(offload='"offload_optimizer": {"device": "cpu"}') + "\nleave()\n"


@pytest.mark.parametrize("how", ["end", "raise"])
@pytest.mark.parametrize("source", [MONITORS, OFFLOAD], ids=["monitors", "offload"])
def test_a_process_ends_with_its_own_exit_code_while_threads_are_at_work(source: str, how: str) -> None:
    done = run(source, how)
    assert (done.returncode, done.stderr) == (7 if how == "raise" else 0, "")


STUCK = (
    ENGINE.format(offload='"offload_optimizer": {"device": "cpu"}')
    + """
from raydz.offload import pipeline
pipeline.JOIN_S = 0.2
engine.optimizer.finish()
engine.optimizer.pipeline._advance = lambda *_: time.sleep(600)
engine.backward(engine(torch.ones(1, 512)).sum())
engine.step()
leave()
"""
)


def test_an_update_that_never_ends_holds_up_no_exit() -> None:
    """As one that waits for a stream which a lost peer has stuck."""
    assert run(STUCK, "raise").returncode == 7


@pytest.mark.parametrize("how", ["end", "raise"])
def test_a_save_that_was_begun_is_committed_although_the_script_ends(tmp_path: Path, how: str) -> None:
    done = run(SAVE, how, tmp_path)
    assert done.returncode == (7 if how == "raise" else 0), done.stderr
    assert committed_steps(LocalStore(tmp_path)) == [3]
