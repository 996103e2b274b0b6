"""Failures of each kind through Ray, for real, and what the policies make of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.runs import (
    assert_gone,
    losses,
    read_lines,
    small_config,
    start_driver,
    wait_for_checkpoint,
    wait_for_step,
    worker_pids,
)

pytestmark = pytest.mark.ray


def log_of(root: Path) -> str:
    return (root / "driver" / "driver.log").read_text()


@pytest.mark.slow
def test_a_stopped_worker_is_found_shown_and_replaced(ray_cluster, straight, tmp_path: Path) -> None:
    config = small_config(tmp_path, "stopped", failure={"hang_floor_s": 5.0})
    process = start_driver({"config": config, "loss": "slow_loss"}, tmp_path / "driver", ray_cluster.env)
    wait_for_step(tmp_path, "stopped", 12, process)
    victims = worker_pids(tmp_path, "stopped")
    os.kill(victims[1], signal.SIGSTOP)
    stopped_at = time.monotonic()
    while "hang: rank 1" not in log_of(tmp_path):
        assert time.monotonic() - stopped_at < 60, log_of(tmp_path)[-3000:]
        time.sleep(0.2)
    assert process.wait(timeout=240) == 0, log_of(tmp_path)[-5000:]
    assert losses(tmp_path, "stopped") == straight
    assert "stack of rank 1" in log_of(tmp_path) and "train_step" in log_of(tmp_path)
    assert "failure 1 of at most 3: hang: rank 1" in log_of(tmp_path)
    assert_gone([*victims, *worker_pids(tmp_path, "stopped")])


@pytest.mark.slow
def test_a_step_that_fails_again_and_again_is_left_out_when_asked(ray_cluster, tmp_path: Path) -> None:
    failure = {"max_failures": 9, "max_at_same_step": 2, "on_poison": "skip"}
    config = small_config(tmp_path, "poison", failure=failure, train={"steps": 10})
    process = start_driver({"config": config, "loss": "poisoned_loss"}, tmp_path / "driver", ray_cluster.env)
    assert process.wait(timeout=300) == 0, log_of(tmp_path)[-5000:]
    assert sorted(losses(tmp_path, "poison")) == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    left_out = [e["step"] for e in read_lines(tmp_path / "poison" / "events.jsonl") if e["event"] == "step_left_out"]
    assert left_out == [7]


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_when_asked(ray_cluster, straight, tmp_path) -> None:
    config = small_config(tmp_path, "damaged", failure={"on_bad_checkpoint": "previous"})
    process = start_driver({"config": config, "loss": "slow_loss"}, tmp_path / "driver", ray_cluster.env)
    wait_for_step(tmp_path, "damaged", 12, process)
    newest = wait_for_checkpoint(tmp_path, "damaged", 10, process)
    for file in newest.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    os.kill(worker_pids(tmp_path, "damaged")[0], signal.SIGKILL)
    assert process.wait(timeout=300) == 0, log_of(tmp_path)[-5000:]
    assert losses(tmp_path, "damaged") == straight
    starts = [e["step"] for e in read_lines(tmp_path / "damaged" / "events.jsonl") if e["event"] == "start"]
    assert starts == [0, 5]
    assert (newest / "set-aside.json").exists() and (newest / "manifest.json").exists(), "saved anew beside it"
