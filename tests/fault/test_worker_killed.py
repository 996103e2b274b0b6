"""A Ray worker is killed for real in mid-run; the run goes on from its newest checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.runs import losses, read_lines, small_config, start_driver

pytestmark = pytest.mark.ray


def wait_for_step(root: Path, name: str, step: int, process, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        lines = read_lines(root / name / "journal.jsonl")
        if lines and lines[-1]["step"] >= step:
            return
        assert process.poll() is None, "the driver ended early"
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


def worker_pids(root: Path, name: str) -> list[int]:
    """Pids of the newest attempt's ranks, in rank order."""
    events = [event for event in read_lines(root / name / "events.jsonl") if event["event"] == "ranks"]
    return [int(place.rpartition(":")[2]) for place in events[-1]["processes"]]


@pytest.fixture(scope="module")
def straight(ray_cluster, tmp_path_factory) -> dict[int, float]:
    """Losses of the run that nothing happened to."""
    root = tmp_path_factory.mktemp("straight")
    options = {"config": small_config(root, "straight"), "loss": "slow_loss"}
    process = start_driver(options, root / "driver", ray_cluster.env)
    assert process.wait(timeout=240) == 0, (root / "driver" / "driver.log").read_text()[-3000:]
    return losses(root, "straight")


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)], ids=["rank1", "rank0"])
def test_a_killed_worker_does_not_end_the_run(ray_cluster, straight, tmp_path: Path, rank: int) -> None:
    tracking = {"mlflow": True, "mlflow_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    config = small_config(tmp_path, "killed", tracking=tracking)
    process = start_driver({"config": config, "loss": "slow_loss"}, tmp_path / "driver", ray_cluster.env)
    wait_for_step(tmp_path, "killed", 12, process)
    victims = worker_pids(tmp_path, "killed")
    os.kill(victims[rank], signal.SIGKILL)
    assert process.wait(timeout=240) == 0, (tmp_path / "driver" / "driver.log").read_text()[-5000:]

    assert losses(tmp_path, "killed") == straight
    starts = [e["step"] for e in read_lines(tmp_path / "killed" / "events.jsonl") if e["event"] == "start"]
    assert starts == [0, 10], "the second attempt begins at the newest checkpoint"
    assert_one_mlflow_run(tmp_path, json.loads((tmp_path / "driver" / "result.json").read_text())["mlflow_run_id"])
    assert_gone([*victims, *worker_pids(tmp_path, "killed")])


def assert_one_mlflow_run(root: Path, run_id: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("raydz")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.run_id for run in runs] == [run_id]
    assert runs[0].info.status == "FINISHED"
    for name in ("loss", "memory_peak_bytes", "step_time_s", "comm_share"):
        steps = [point.step for point in client.get_metric_history(run_id, name)]
        assert sorted(step for step in steps if step) == list(range(1, 21)), name


def assert_gone(pids: list[int], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError("worker processes outlive the run")
