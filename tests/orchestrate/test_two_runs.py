"""Two runs on one cluster at the same time: neither sees the other, whatever happens to one of them."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from tests.support.runs import (
    assert_gone,
    losses,
    read_lines,
    run_torchrun,
    small_config,
    start_driver,
    wait_for_checkpoint,
    wait_for_step,
    worker_pids,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]


LONG = 120
"""Steps of the run that is to go on for the longer time."""


def config_of(root: Path, name: str, mlflow: bool = True, steps: int = 20) -> dict:
    tracking = {"mlflow": mlflow, "mlflow_uri": f"sqlite:///{root}/mlflow.db", "log_json": name == "hurt"}
    return small_config(root, name, tracking=tracking, train={"steps": steps})


def first(count: int, series: dict[int, float]) -> dict[int, float]:
    return {step: loss for step, loss in series.items() if step <= count}


def events(root: Path, name: str, kind: str) -> list[dict]:
    return [event for event in read_lines(root / name / "events.jsonl") if event["event"] == kind]


def mlflow_steps(root: Path) -> dict[str, list[int]]:
    """Steps of the loss of every MLflow run, by run name, as MLflow has them."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments)
    assert len({run.info.run_name for run in runs}) == len(runs)
    assert {run.info.status for run in runs} == {"FINISHED"}
    return {
        run.info.run_name: sorted(point.step for point in client.get_metric_history(run.info.run_id, "loss"))
        for run in runs
    }


def train_tab(dashboard: str, name: str) -> list[dict]:
    """What Ray's dashboard shows of a run, the oldest first: one entry an attempt of raydz's."""
    with urllib.request.urlopen(f"{dashboard}/api/train/v2/runs/v1", timeout=30) as answer:
        shown = json.load(answer)["train_runs"]
    return sorted((run for run in shown if run["name"] == name), key=lambda run: run["start_time_ns"])


def assert_in_the_train_tab(dashboard: str, root: Path) -> None:
    hurt, calm = train_tab(dashboard, "hurt"), train_tab(dashboard, "calm")
    assert [run["status"] for run in hurt] == ["ERRORED", "FINISHED"], hurt
    assert [run["status"] for run in calm] == ["FINISHED"], calm
    for run in (*hurt, *calm):
        [attempt] = run["attempts"]
        assert [worker["world_rank"] for worker in attempt["workers"]] == [0, 1]
    assert [worker["pid"] for worker in hurt[-1]["attempts"][0]["workers"]] == worker_pids(root, "hurt")


def assert_one_line_an_event(log: Path, recorded: list[dict]) -> None:
    """With `tracking.log_json` every event of the run is one line of JSON in the driver's log, its workers' too."""
    found = [json.loads(line) for line in re.findall(r"\{\"event\".*\}$", log.read_text(), flags=re.M)]
    assert Counter(line["event"] for line in found) == Counter(event["event"] for event in recorded)


def test_one_loses_a_worker_and_the_other_does_not_notice(ray_cluster, tmp_path: Path) -> None:
    """One cluster, root folder and MLflow; `hurt` is struck in mid-run, and gets a new group, while `calm` trains."""
    configs = {
        "hurt": config_of(tmp_path, "hurt") | {"failure": {"in_place": False}},
        "calm": config_of(tmp_path, "calm", steps=LONG),
    }
    drivers = {
        name: start_driver({"config": config, "loss": "slow_loss"}, tmp_path / f"{name}-driver", ray_cluster.env)
        for name, config in configs.items()
    }
    try:
        wait_for_step(tmp_path, "hurt", 7, drivers["hurt"], limit_s=400)
        wait_for_checkpoint(tmp_path, "hurt", 5, drivers["hurt"])
        wait_for_step(tmp_path, "calm", 2, drivers["calm"], limit_s=400)
        assert drivers["calm"].poll() is None, "both train at the same time"
        os.kill(worker_pids(tmp_path, "hurt")[1], signal.SIGKILL)
        for name, driver in drivers.items():
            assert driver.wait(timeout=500) == 0, (tmp_path / f"{name}-driver/driver.log").read_text()[-4000:]
    finally:
        for driver in drivers.values():
            driver.kill()
    alone = config_of(tmp_path, "alone", mlflow=False, steps=LONG)
    assert run_torchrun(alone, tmp_path / "t", ranks=2).returncode == 0
    assert losses(tmp_path, "calm") == losses(tmp_path, "alone")
    assert losses(tmp_path, "hurt") == first(20, losses(tmp_path, "alone"))
    assert len(events(tmp_path, "hurt", "failure")) == 1 and not events(tmp_path, "calm", "failure")
    assert len(events(tmp_path, "calm", "start")) == 1
    pids = {name: set(worker_pids(tmp_path, name)) for name in drivers}
    assert not pids["hurt"] & pids["calm"]
    assert mlflow_steps(tmp_path) == {"hurt": list(range(1, 21)), "calm": list(range(1, LONG + 1))}
    results = [json.loads((tmp_path / f"{name}-driver/result.json").read_text()) for name in drivers]
    assert results[0]["mlflow_run_id"] != results[1]["mlflow_run_id"]
    assert all(f"/{name}/" in result["checkpoint_uri"] for name, result in zip(drivers, results, strict=True))
    assert_gone([*pids["hurt"], *pids["calm"]])
    assert_in_the_train_tab(ray_cluster.dashboard, tmp_path)
    assert_one_line_an_event(tmp_path / "hurt-driver/driver.log", read_lines(tmp_path / "hurt" / "events.jsonl"))


def test_one_is_stopped_and_the_other_goes_on(ray_cluster, tmp_path: Path) -> None:
    """SIGTERM of one driver saves that run alone; its workers and its board end, the other's stay."""
    drivers = {}
    for name in ("stopped", "on"):
        config = config_of(tmp_path, name, mlflow=False, steps=LONG)
        drivers[name] = start_driver(
            {"config": config, "loss": "slow_loss"}, tmp_path / f"{name}-driver", ray_cluster.env
        )
    try:
        for name, driver in drivers.items():
            wait_for_step(tmp_path, name, 2, driver, limit_s=400)
        drivers["stopped"].terminate()
        assert drivers["stopped"].wait(timeout=240) == 128 + signal.SIGTERM
        assert drivers["on"].wait(timeout=500) == 0, (tmp_path / "on-driver/driver.log").read_text()[-4000:]
    finally:
        for driver in drivers.values():
            driver.kill()
    assert sorted(losses(tmp_path, "on")) == list(range(1, LONG + 1))
    stopped = losses(tmp_path, "stopped")
    assert 2 <= len(stopped) < LONG and stopped == first(len(stopped), losses(tmp_path, "on"))
    assert not events(tmp_path, "on", "failure") and len(events(tmp_path, "on", "start")) == 1
