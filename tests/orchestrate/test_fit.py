"""raydz.fit with real Ray processes: the same numbers as torchrun, typed errors, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import REPOSITORY, losses, run_torchrun, small_config, start_driver

pytestmark = pytest.mark.ray


def fit(options: dict, folder: Path, env: dict[str, str], limit_s: float = 240) -> tuple[int, dict]:
    process = start_driver(options, folder, env)
    code = process.wait(timeout=limit_s)
    result = folder / "result.json"
    assert result.exists(), (folder / "driver.log").read_text()[-5000:]
    return code, json.loads(result.read_text())


def test_two_ray_workers_equal_two_torchrun_ranks_bit_for_bit(ray_cluster, tmp_path: Path) -> None:
    code, result = fit({"config": small_config(tmp_path, "ray")}, tmp_path / "driver", ray_cluster.env)
    assert code == 0 and result["status"] == "finished" and result["step"] == 20
    done = run_torchrun(small_config(tmp_path, "torchrun"), tmp_path / "t", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path, "ray") == losses(tmp_path, "torchrun")
    assert len(losses(tmp_path, "ray")) == 20


@pytest.mark.slow
def test_peoples_own_model_and_loss(ray_cluster, tmp_path: Path) -> None:
    config = small_config(tmp_path, "own", train={"steps": 6, "eval_every": 6})
    config["optimizer"]["params"]["lr"] = 0.1
    options = {"config": config, "model": "build_model", "loss": "own_loss"}
    code, result = fit(options, tmp_path / "driver", ray_cluster.env)
    assert code == 0 and result["step"] == 6
    series = losses(tmp_path, "own")
    assert series[6] < series[1] - 0.05


def test_missing_data_is_a_data_error_before_any_step(ray_cluster, tmp_path: Path) -> None:
    config = small_config(tmp_path, "nodata", data={"sources": [str(tmp_path / "nowhere.txt")]})
    code, result = fit({"config": config}, tmp_path / "driver", ray_cluster.env, limit_s=60)
    assert code == 1 and result["error"] == "DataError" and "nowhere.txt" in result["text"]
    assert not (tmp_path / "nodata" / "journal.jsonl").exists()


@pytest.mark.slow
def test_an_error_that_a_restart_cannot_mend_is_not_retried(ray_cluster, tmp_path: Path) -> None:
    options = {"config": small_config(tmp_path, "hopeless"), "loss": "hopeless_loss"}
    code, result = fit(options, tmp_path / "driver", ray_cluster.env)
    assert code == 1 and result["error"] == "DataError" and "a row that cannot be used" in result["text"]
    log = (tmp_path / "driver" / "driver.log").read_text()
    assert log.count("Started training worker group") == 1, log[-3000:]


@pytest.mark.slow
def test_a_bug_is_retried_and_then_the_run_is_given_up(ray_cluster, tmp_path: Path) -> None:
    config = small_config(tmp_path, "bug", failure={"max_failures": 1, "in_place": False})
    code, result = fit({"config": config, "loss": "broken_loss"}, tmp_path / "driver", ray_cluster.env)
    assert code == 1 and result["error"] == "TrainingError" and "given up" in result["text"]
    log = (tmp_path / "driver" / "driver.log").read_text()
    assert log.count("Started training worker group") == 2 and "a bug in the user's loss" in log


def test_a_local_cluster_that_is_too_small_is_a_placement_error(tmp_path: Path, ray_cluster) -> None:
    env = {name: value for name, value in ray_cluster.env.items() if name != "RAY_ADDRESS"}
    config = small_config(tmp_path, "big", scaling={"num_workers": 2, "cpus_per_worker": 500.0})
    code, result = fit({"config": config}, tmp_path / "driver", env, limit_s=120)
    assert code == 1 and result["error"] == "PlacementError" and "1000 CPU" in result["text"]


@pytest.mark.parametrize(
    "arguments,code",
    [
        pytest.param((), 0, id="success"),
        pytest.param(("--set", "train.stepz=3"), 1, id="failure", marks=pytest.mark.slow),
    ],
)
def test_ray_job_submit_runs_the_script_and_tells_how_it_ended(ray_cluster, tmp_path: Path, arguments, code) -> None:
    config = tmp_path / "job.json"
    config.write_text(json.dumps(small_config(tmp_path, "job", train={"steps": 3})))
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", ray_cluster.dashboard,
         "--working-dir", str(REPOSITORY), "--", "python", "jobs/pretrain.py", "--config", str(config), *arguments],
        env=ray_cluster.env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode != 0) == bool(code), done.stdout[-3000:]
    if code:
        assert "did you mean" in done.stdout.lower() or "train.steps" in done.stdout
    else:
        assert "run job finished at step 3" in done.stdout
        assert len(losses(tmp_path, "job")) == 3
