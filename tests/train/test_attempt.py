"""What the failures before an attempt decided, obeyed by the loop; one process."""

from __future__ import annotations

from pathlib import Path

from raydz.checkpoint import committed_steps
from raydz.config import load
from raydz.dist import init_world
from raydz.storage import open_store
from raydz.train import run_training
from raydz.train.attempt import Attempt
from tests.support.runs import losses, small_config


def test_a_last_step_that_is_left_out_still_leaves_the_runs_end(tmp_path: Path) -> None:
    config = load(small_config(tmp_path, "run", train={"steps": 4, "eval_every": 2}, checkpoint={"every": 50}))
    result = run_training(config, init_world("cpu"), attempt=Attempt(skips=frozenset({4})))
    assert (result.status, result.step) == ("finished", 4)
    assert sorted(losses(tmp_path, "run")) == [1, 2, 3]
    assert committed_steps(open_store(str(tmp_path / "run" / "checkpoints"))) == [4]
