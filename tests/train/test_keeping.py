"""Retention in a run: what is left of its checkpoints, and that trouble with it never ends training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from raydz.errors import StorageError
from raydz.storage.local import LocalStore
from tests.train.runs import (
    Interrupted,
    InterruptingLoss,
    column,
    environment,
    manifests,
    run,
    run_config,
    write_config,
)

EVALS = {"steps": 6, "eval_every": 1, "eval_rows": 4}


def steps(folder) -> list[int]:
    return [int(name.removeprefix("step-")) for name in manifests(folder)]


def events(folder, name):
    lines = map(json.loads, (folder / "runs/a/events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6]),
        ({"keep_last": 2, "sweep_after_s": None}, [5, 6]),
    ],
)
def test_what_the_rules_name_is_left(tmp_path, rules, left, is_async):
    run(run_config(tmp_path, checkpoint={"every": 1, "async_save": is_async, **rules}))
    assert steps(tmp_path) == left
    removed = [name for event in events(tmp_path, "checkpoints_removed") for name in event["checkpoints"]]
    assert [int(name[-10:]) for name in removed] == [step for step in range(1, 7) if step not in left]


def test_the_best_is_left(tmp_path):
    """The journal says which it is; the evaluation loss falls in so short a run, so the greatest is the oldest."""
    best = {"metric": "eval_loss", "mode": "max"}
    run(run_config(tmp_path, train=EVALS, checkpoint={"every": 1, "keep_last": 1, "keep_best": best}))
    losses = column(tmp_path, "eval_loss")
    worst = 1 + losses.index(max(losses))
    assert worst != 6 and steps(tmp_path) == [worst, 6]


def test_a_metric_that_is_not_there_is_warned_about_once(tmp_path, caplog):
    checkpoint = {"every": 1, "keep_last": 1, "keep_best": {"metric": "accuracy"}}
    run(run_config(tmp_path, checkpoint=checkpoint))
    told = [record.getMessage() for record in caplog.records if "keep_best" in record.getMessage()]
    assert len(told) == 1 and "accuracy" in told[0] and "loss" in told[0]
    assert steps(tmp_path) == [6]


def test_the_checkpoint_that_a_run_went_on_from_stays_while_it_runs(tmp_path):
    config = run_config(tmp_path, checkpoint={"every": 2})
    with pytest.raises(Interrupted):
        run(config, loss=InterruptingLoss(after=5))
    assert steps(tmp_path) == [2, 4]
    config["checkpoint"] = {"every": 1, "keep_last": 1}
    run(config)
    assert steps(tmp_path) == [4, 6]


def test_torn_saves_of_earlier_attempts_are_swept(tmp_path):
    torn = tmp_path / "runs/a/checkpoints/step-0000000005/0123abcd"
    torn.mkdir(parents=True)
    (torn / "rank-00000-of-00002.safetensors").write_bytes(b"half")
    young = shutil.copytree(torn, torn.with_name("0123abce"))
    os.utime(torn / "rank-00000-of-00002.safetensors", (time.time() - 86500,) * 2)
    run(run_config(tmp_path))
    assert not torn.exists() and young.exists()
    (event,) = events(tmp_path, "checkpoints_removed")
    assert event["orphans"] == ["step-0000000005/0123abcd"] and event["bytes"] == 4


@pytest.mark.parametrize("broken", ["delete", "list_objects"])
def test_trouble_is_counted_and_training_goes_on(tmp_path, monkeypatch, caplog, broken):
    usual = getattr(LocalStore, broken)

    def failing(self, keys="", **rest):
        keys = keys if isinstance(keys, str) else list(keys)
        if broken == "list_objects" or any("manifest" in key for key in keys):
            raise StorageError("not today", got="EIO")
        return usual(self, keys, **rest)

    monkeypatch.setattr(LocalStore, broken, failing)
    assert run(run_config(tmp_path, checkpoint={"every": 2, "keep_last": 1})).status == "finished"
    assert steps(tmp_path) == [2, 4, 6] and len(column(tmp_path, "loss")) == 6
    failures = [event["failures"] for event in events(tmp_path, "keeping_failed")]
    assert failures == ([1, 2] if broken == "delete" else [1, 2, 3])
    assert "not today" in caplog.text
    monkeypatch.undo()
    run(run_config(tmp_path, train={"steps": 7}, checkpoint={"every": 1, "keep_last": 1}))
    assert steps(tmp_path) == [6, 7]  # the first attempt's are gone; it went on from 6


KILLED = """
import os, sys
from raydz.checkpoint.sweep import Sweeper
from raydz.train.__main__ import main

plan = Sweeper.plan
calls = []

def dying(self):
    calls.append(self)
    if len(calls) == 3:
        os.kill(os.getpid(), 9)
    return plan(self)

Sweeper.plan = dying
sys.exit(main(["--config", sys.argv[1]]))
"""


@pytest.mark.slow
def test_killed_between_commit_and_sweep_the_next_attempt_sweeps(tmp_path):
    config = run_config(tmp_path, checkpoint={"every": 1, "keep_last": 1})
    path = write_config(tmp_path, config)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert killed.returncode == -9, killed.stderr
    assert steps(tmp_path) in ([2, 3], [2, 3, 4])  # the third was committed and nothing swept after it
    assert run(config).status == "finished"
    assert steps(tmp_path)[-1] == 6 and 2 not in steps(tmp_path)
