"""`python -m raydz.train` as people start it, and what MLflow is told."""

from __future__ import annotations

import json
import sqlite3

import pytest

from tests.train.runs import (
    Interrupted,
    InterruptingLoss,
    column,
    manifests,
    run,
    run_config,
    run_on_rank,
    train_by_command,
)


def test_command_trains_and_says_where_everything_is(tmp_path):
    done = train_by_command(tmp_path, run_config(tmp_path), "--set", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert "finished at step 2" in done.stdout
    assert f"checkpoint: {tmp_path}/runs/a/checkpoints/step-0000000002" in done.stdout
    assert "hidden_size: 32" in done.stdout, "the resolved configuration is shown"
    again = train_by_command(
        tmp_path, run_config(tmp_path), "--set", "train.steps=2", "--set", "tracking.log_json=true"
    )
    assert again.returncode == 0 and "complete" in again.stdout and "train.steps" in again.stdout
    lines = [json.loads(line) for line in again.stderr.splitlines() if line.startswith("{")]
    assert any(line["message"].startswith("resumed from") and line["level"] == "INFO" for line in lines)


def test_torchrun_trains_as_ranks_of_any_other_launcher(ranks, tmp_path):
    config = run_config(tmp_path, zero_optimization={"stage": 3})
    done = train_by_command(tmp_path, config, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished at step 6") == 1
    ranks(2).run(run_on_rank, run_config(tmp_path, run={"name": "pool"}, zero_optimization={"stage": 3}))
    assert column(tmp_path, "loss") == column(tmp_path, "loss", "pool")
    assert manifests(tmp_path) == manifests(tmp_path, "pool")


def test_mlflow_has_one_run_with_each_step_once_and_a_true_status(tmp_path):
    config = run_config(tmp_path, tracking={"mlflow": True})
    with pytest.raises(Interrupted):
        run(config, loss=InterruptingLoss(5))
    with sqlite3.connect(tmp_path / "runs/mlflow.db") as database:
        assert database.execute("select status from runs").fetchall() == [("FAILED",)]
    database.close()
    result = run(config)
    with sqlite3.connect(tmp_path / "runs/mlflow.db") as database:
        assert database.execute("select run_uuid, status from runs").fetchall() == [(result.mlflow_run_id, "FINISHED")]
        points = database.execute("select step, value from metrics where key = 'loss' order by step").fetchall()
    database.close()
    # steps 5 and later were computed again after the restart at 4: the same numbers
    assert dict(points) == dict(enumerate(column(tmp_path, "loss"), 1))
    assert len(set(points)) == 6
