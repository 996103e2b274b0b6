"""A Ray worker is killed for real in mid-run; the run goes on from its newest checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
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


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0], ids=["rank1", "rank0"])
def test_a_killed_worker_does_not_end_the_run(ray_cluster, straight, tmp_path: Path, rank: int) -> None:
    tracking = {"mlflow": True, "mlflow_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    config = small_config(tmp_path, "killed", tracking=tracking)
    process = start_driver({"config": config, "loss": "slow_loss"}, tmp_path / "driver", ray_cluster.env)
    wait_for_step(tmp_path, "killed", 14, process)  # the checkpoint of step 10 is saved behind the steps after it
    wait_for_checkpoint(tmp_path, "killed", 10, process)
    victims = worker_pids(tmp_path, "killed")
    os.kill(victims[rank], signal.SIGKILL)
    assert process.wait(timeout=240) == 0, (tmp_path / "driver" / "driver.log").read_text()[-5000:]

    assert losses(tmp_path, "killed") == straight
    starts = [e["step"] for e in read_lines(tmp_path / "killed" / "events.jsonl") if e["event"] == "start"]
    assert starts == [0, 10], "the second attempt begins at the newest checkpoint"
    assert_told(tmp_path)
    assert_one_mlflow_run(tmp_path, json.loads((tmp_path / "driver" / "result.json").read_text())["mlflow_run_id"])
    assert_gone([*victims, *worker_pids(tmp_path, "killed")])


def assert_told(root: Path) -> None:
    """The failure and what it cost are events, and metrics of every step after it."""
    events = read_lines(root / "killed" / "events.jsonl")
    [failure] = [event for event in events if event["event"] == "failure"]
    assert (failure["kind"], failure["decision"], failure["attempt"]) == ("killed", "restart", 0)
    assert failure["failed_step"] > 14 and failure["reason"].startswith("failure 1 of at most 3")
    [recovered] = [event for event in events if event["event"] == "recovered"]
    assert (recovered["step"], recovered["from_step"], recovered["restarts"]) == (11, 10, 1)
    assert recovered["lost_steps"] == failure["failed_step"] - 1 - 10
    seconds = recovered["recovery_s"]
    phases = [seconds[name] for name in ("detect", "start", "load", "first_step")]
    assert all(phases) and sum(phases) == pytest.approx(seconds["total"], abs=0.01) and seconds["total"] < 120
    after = read_lines(root / "killed" / "journal.jsonl")[-1]
    assert after["restarts"] == 1 and after["recovery_s"] == pytest.approx(seconds["total"], abs=0.01)
    print("recovery_s", seconds)


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
    recovery = client.get_metric_history(run_id, "recovery_s/start")
    assert recovery and all(point.step > 10 for point in recovery)
    assert runs[0].data.tags["raydz.attempt.0.failure"].startswith("killed: ")
