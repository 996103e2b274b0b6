"""Runs on hosts of their own networks, for `test_hosts.py`: how they start, and what must hold after each fault."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.hosts import Host, Hosts
from tests.support.runs import REPOSITORY, assert_gone, losses, read_lines, small_config, worker_pids

NAME = "run"
STEPS = 20


@dataclass
class HostRun:
    """One run's driver on the head, with checkpoints on S3; `start` may be called again, with the same command."""

    hosts: Hosts
    root: Path
    checkpoints: str
    endpoint_url: str
    sections: Mapping[str, Any]
    loss: str = "slow_loss"
    process: subprocess.Popen | None = None

    def start(self) -> HostRun:
        """Start the driver."""
        sections: dict[str, Any] = {
            "tracking": {"mlflow": True, "mlflow_uri": f"sqlite:///{self.root}/mlflow.db"},
            "storage": {"endpoint_url": self.endpoint_url, "connect_timeout_s": 2.0, "read_timeout_s": 5.0},
            "checkpoint": {"every": 5, "dir": self.checkpoints},
        }
        for name, given in self.sections.items():
            sections[name] = {**sections.get(name, {}), **given}
        config = small_config(self.root, NAME, **sections)
        options = self.root / "options.json"
        text = {"config": config, "loss": self.loss, "result": str(self.root / "result.json")}
        options.write_text(json.dumps(text))
        with (self.root / "driver.log").open("a") as output:
            self.process = self.hosts.run_on(
                self.hosts.hosts[0], [sys.executable, "-m", "tests.support.fit_driver", str(options)],
                env={"PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return self

    @property
    def log(self) -> str:
        return (self.root / "driver.log").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of the run so far."""
        return [event for event in read_lines(self.root / NAME / "events.jsonl") if event["event"] == kind]

    def until(self, condition: Callable[[], Any], what: str, limit_s: float = 600) -> None:
        """Wait while the driver lives."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process is not None and self.process.poll() is None, f"the driver ended early\n{self.tail()}"
            assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s\n{self.tail()}"
            time.sleep(0.1)

    def until_step(self, step: int, saved: int | None = None) -> list[int]:
        """Wait for a step, and the checkpoint of another; the ranks' pids."""
        path = self.root / NAME / "journal.jsonl"
        self.until(lambda: (lines := read_lines(path)) and lines[-1]["step"] >= step, f"step {step}")
        if saved is not None:
            self.until(lambda: saved in [event["step"] for event in self.events("checkpoint")], f"checkpoint {saved}")
        return worker_pids(self.root, NAME)

    def host_of_rank(self, rank: int) -> Host:
        """Where a rank runs now."""
        return self.hosts.host_of(worker_pids(self.root, NAME)[rank])

    def ends_well(self, straight: Mapping[int, float], limit_s: float = 900) -> None:
        """The driver ends with 0; every step's loss is the undisturbed run's, in one MLflow run, and nobody is left."""
        assert self.process is not None and self.process.wait(timeout=limit_s) == 0, self.tail()
        assert losses(self.root, NAME) == straight
        if (self.root / "mlflow.db").exists():
            self._assert_one_mlflow_run()
        pids = {int(p.rpartition(":")[2]) for event in self.events("ranks") for p in event["processes"]}
        assert_gone(sorted(pids))

    def _assert_one_mlflow_run(self) -> None:
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{self.root}/mlflow.db")
        experiment = client.get_experiment_by_name("raydz")
        assert experiment is not None
        [run] = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED"
        points = client.get_metric_history(run.info.run_id, "loss")
        assert sorted(point.step for point in points) == list(range(1, STEPS + 1))

    def tail(self) -> str:
        """The end of the driver's log."""
        return self.log[-5000:]
