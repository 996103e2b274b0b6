"""`raydz submit` against a real Ray head: success, failure, stop, a broken stream, a lost driver, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ray_cluster import start_cluster, stop_cluster
from tests.support.runs import REPOSITORY, losses, read_lines, small_config, wait_for_step
from tests.support.tcp_proxy import resetting_proxy

pytestmark = pytest.mark.ray
BIN = Path(sys.executable).parent

TALKATIVE = """
import os, sys, time
for i in range(300):
    print(f"line {i} " + "x" * 50, flush=True)
    while i == 200 and not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
print(os.environ["RAYDZ_RUN_NAME"], os.environ["RAY_JOB_STOP_WAIT_TIME_S"], os.environ["COLOUR"], flush=True)
sys.exit(int(sys.argv[1]))
"""


class Submitted:
    """A running `raydz submit`; its output goes to files, so that it can be read meanwhile."""

    def __init__(self, cluster, folder: Path, *arguments: str, address: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [str(BIN / "raydz"), "submit", "--address", address or cluster.dashboard, *arguments],
                env=cluster.env, stdout=out, stderr=err, cwd=folder,
            )  # fmt: skip

    def wait(self, limit_s: float = 400) -> int:
        try:
            return self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.err.read_text()[-2000:] + self.out.read_text()[-3000:]) from None

    @property
    def job_id(self) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            words = self.err.read_text().split()
            if "job" in words and words[words.index("job") + 1].startswith("raydz-"):
                return words[words.index("job") + 1]
            assert self.process.poll() is None, self.err.read_text()
            time.sleep(0.1)
        raise AssertionError("no job was submitted")


def talkative(folder: Path) -> str:
    folder.mkdir()
    (folder / "talk.py").write_text(TALKATIVE)
    return str(folder)


def job(cluster, *arguments: str) -> subprocess.CompletedProcess:
    command = [str(BIN / "ray"), "job", arguments[0], "--address", cluster.dashboard, *arguments[1:]]
    return subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("code", [3, 0])
def test_exit_code_and_every_line_once_though_the_stream_breaks(ray_cluster, tmp_path: Path, code: int) -> None:
    folder = talkative(tmp_path / "project")
    with resetting_proxy(ray_cluster.dashboard, b"/logs/tail", after_bytes=5000, times=2) as proxy:
        go = tmp_path / "go"  # the script waits for it in the middle of its lines
        submitted = Submitted(
            ray_cluster, tmp_path, "--working-dir", folder, "--run-name", "first", "--env", "COLOUR=blue",
            "--stop-wait-s", "45", "--wait", "--", "python", "talk.py", str(code), str(go), address=proxy.url,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while proxy.resets < 2:
            assert time.monotonic() < deadline and submitted.process.poll() is None, submitted.err.read_text()
            time.sleep(0.05)
        go.touch()
        assert submitted.wait() == code, submitted.err.read_text()
    of_ray = ("Running entrypoint for job", "INFO job_manager.py")
    lines = [line for line in submitted.out.read_text().splitlines() if not any(word in line for word in of_ray)]
    assert lines == [f"line {i} {'x' * 50}" for i in range(300)] + ["first 45 blue"]
    assert f"ended with exit code {code}" in submitted.err.read_text()


@pytest.mark.slow
def test_without_wait_it_says_how_to_follow_and_stop(ray_cluster, tmp_path: Path) -> None:
    folder = talkative(tmp_path / "project")
    code = "import time; time.sleep(99)"
    submitted = Submitted(ray_cluster, tmp_path, "--working-dir", folder, "--", "python", "-c", code)
    assert submitted.wait(60) == 0
    said = submitted.err.read_text()
    assert f"ray job stop --address {ray_cluster.dashboard} {submitted.job_id}" in said
    assert job(ray_cluster, "stop", submitted.job_id).returncode == 0


def train_arguments(tmp_path: Path, name: str, **sections) -> list[str]:
    config = tmp_path / f"{name}.json"
    tracking = {"mlflow": True, "mlflow_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    config.write_text(json.dumps(small_config(tmp_path, name, tracking=tracking, **sections)))
    return ["--working-dir", str(REPOSITORY), "--wait", "--", "python", "jobs/pretrain.py", "--config", str(config)]


def mlflow_statuses(root: Path) -> list[str]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("raydz")
    return [run.info.status for run in client.search_runs([experiment.experiment_id])]


STEPS = 400
TRAIN = {"steps": STEPS, "eval_every": 0, "log_every": 100}
SAVING = {"every": 0, "at_end": True}


@pytest.mark.slow
def test_ray_job_stop_leaves_a_checkpoint_and_the_run_goes_on(ray_cluster, tmp_path: Path) -> None:
    arguments = train_arguments(tmp_path, "stopped", train=TRAIN, checkpoint=SAVING)
    submitted = Submitted(ray_cluster, tmp_path, *arguments)
    wait_for_step(tmp_path, "stopped", 12, submitted.process, limit_s=300)
    assert job(ray_cluster, "stop", "--no-wait", submitted.job_id).returncode == 0
    assert submitted.wait() == 143 and "was stopped" in submitted.err.read_text()
    last = max(losses(tmp_path, "stopped"))
    assert 12 <= last < STEPS and f"was stopped after step {last} of {STEPS}" in submitted.out.read_text()
    (manifest,) = (tmp_path / "stopped" / "checkpoints").glob("*/manifest.json")
    assert manifest.parent.name == f"step-{last:010d}"
    assert mlflow_statuses(tmp_path) == ["KILLED"]

    again = Submitted(ray_cluster, tmp_path / "again", *arguments)
    assert again.wait() == 0, again.out.read_text()[-3000:]
    assert sorted(losses(tmp_path, "stopped")) == list(range(1, STEPS + 1))
    starts = [event["step"] for event in read_lines(tmp_path / "stopped" / "events.jsonl") if event["event"] == "start"]
    assert starts == [0, last] and mlflow_statuses(tmp_path) == ["FINISHED"]


@pytest.mark.slow
def test_a_killed_driver_is_submitted_again_and_the_run_goes_on(ray_cluster, tmp_path: Path) -> None:
    arguments = train_arguments(tmp_path, "lost", train=TRAIN, checkpoint={"every": 10})
    submitted = Submitted(ray_cluster, tmp_path, "--resubmit", "1", *arguments)
    wait_for_step(tmp_path, "lost", 12, submitted.process, limit_s=300)
    (driver,) = driver_pids(str(tmp_path / "lost.json"))
    os.kill(driver, signal.SIGKILL)
    assert submitted.wait() == 0, submitted.err.read_text() + submitted.out.read_text()[-3000:]
    assert "submitting it again" in submitted.err.read_text()
    assert sorted(losses(tmp_path, "lost")) == list(range(1, STEPS + 1))
    starts = [event["step"] for event in read_lines(tmp_path / "lost" / "events.jsonl") if event["event"] == "start"]
    assert len(starts) == 2 and starts[1] >= 10


def driver_pids(config: str) -> list[int]:
    """Of the job's script: Python, with the configuration among its words, and not `raydz submit`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if config in words and "submit" not in words and "python" in Path(words[0]).name:
            found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_running_and_says_so(ray_cluster, tmp_path: Path) -> None:
    folder = talkative(tmp_path / "project")
    code = "import time; print('begun', flush=True); time.sleep(99)"
    submitted = Submitted(ray_cluster, tmp_path, "--working-dir", folder, "--wait", "--", "python", "-c", code)
    deadline = time.monotonic() + 200
    while "begun" not in submitted.out.read_text():
        assert time.monotonic() < deadline and submitted.process.poll() is None, submitted.err.read_text()
        time.sleep(0.1)
    submitted.process.send_signal(signal.SIGINT)
    assert submitted.wait(60) == 130
    said = submitted.err.read_text()
    assert f"job {submitted.job_id} goes on" in said and "ray job logs --follow" in said and "Traceback" not in said
    status = job(ray_cluster, "status", submitted.job_id)
    assert "RUNNING" in status.stdout + status.stderr
    assert job(ray_cluster, "stop", submitted.job_id).returncode == 0


@pytest.mark.slow
def test_a_cluster_with_a_token_lets_in_who_has_it(tmp_path: Path) -> None:
    folder = talkative(tmp_path / "project")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    cluster = start_cluster(1, **token)
    try:
        words = ["--working-dir", folder, "--wait", "--", "python", "-c", "print('inside')"]
        outside = {name: value for name, value in cluster.env.items() if name not in token}
        refused = Submitted(replace(cluster, env=outside | {"HOME": str(tmp_path)}), tmp_path / "refused", *words)
        assert refused.wait() == 1 and "export RAY_AUTH_MODE=token" in refused.err.read_text()
        wrong = replace(cluster, env={**cluster.env, "RAY_AUTH_TOKEN": "b" * 64})
        refused = Submitted(wrong, tmp_path / "wrong", *words)
        assert refused.wait() == 1 and "not the cluster's" in refused.err.read_text()
        let_in = Submitted(cluster, tmp_path / "let_in", *words)
        assert let_in.wait() == 0 and "inside" in let_in.out.read_text()
    finally:
        stop_cluster(cluster)
