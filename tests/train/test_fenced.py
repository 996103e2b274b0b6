"""Two starts of one run under the loop: the older one ends with a typed error at its next commit; no Ray needed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from raydz.checkpoint import committed_steps, open_checkpoint, step_folder
from raydz.checkpoint.generations import read_history
from raydz.config import load
from raydz.dist import init_world
from raydz.errors import ConfigError, Superseded
from raydz.storage import open_store
from raydz.train import run_training
from raydz.train.attempt import Attempt
from tests.support.runs import losses, read_lines
from tests.train.runs import run, run_config

STEPS = 9


def config_in(root: Path, **sections):
    root.mkdir(exist_ok=True)
    return run_config(root, **{"train": {"steps": STEPS}, **sections})


def store_of(root: Path):
    return open_store(str(root / "runs" / "a" / "checkpoints"))


@pytest.mark.parametrize("async_save", [True, False], ids=["behind", "at_once"])
def test_the_older_of_two_starts_ends_at_its_next_commit(tmp_path: Path, async_save: bool) -> None:
    straight = run(config_in(tmp_path / "straight"))
    config = load(config_in(tmp_path, checkpoint={"every": 2, "async_save": async_save}))

    def interrupted_at_5(step: int) -> None:
        """Another job of the same name, from start to end, while this one stands at step 5."""
        if step == 5:
            thread = threading.Thread(target=lambda: outcome.append(run(config_in(tmp_path))))
            thread.start()
            thread.join()

    outcome: list = []
    with pytest.raises(Superseded, match="newer start"):
        run_training(config, init_world("cpu"), attempt=Attempt(ended_step=interrupted_at_5))
    [newer] = outcome
    assert newer.status == "finished" and newer.metrics["loss"] == straight.metrics["loss"]
    store = store_of(tmp_path)
    assert committed_steps(store) == [2, 4, 6, 8, 9]
    tags = [str(open_checkpoint(store, step_folder(step))[1].generation)[:2] for step in committed_steps(store)]
    assert tags == ["1-", "1-", "2-", "2-", "2-"]
    assert losses(tmp_path / "runs", "a")[STEPS] == straight.metrics["loss"]
    finishes = [event for event in read_lines(tmp_path / "runs" / "a" / "events.jsonl") if event["event"] == "finish"]
    assert [event["status"] for event in finishes] == ["FINISHED"], "of the newer one alone"


def test_a_run_that_is_complete_or_refused_claims_nothing(tmp_path: Path) -> None:
    run(config_in(tmp_path))
    assert read_history(store_of(tmp_path)).newest == 1
    assert run(config_in(tmp_path)).status == "complete"
    with pytest.raises(ConfigError):
        run(config_in(tmp_path, resume="never", train={"steps": 20}))
    assert read_history(store_of(tmp_path)).newest == 1, "a mistaken start does not end a run that goes well"
