"""A save that fails is counted and shown; training goes on, until it fails again and again, or at the end."""

from __future__ import annotations

import json

import pytest

from raydz.errors import CheckpointError, StorageError
from raydz.storage.local import LocalStore
from raydz.storage.local_writer import LocalWriter
from tests.train.runs import column, journal, manifests, run, run_config, run_on_rank, try_on_rank


@pytest.fixture
def failing_steps(monkeypatch):
    """Steps whose data file cannot be written."""
    steps: set[int] = set()
    usual = LocalStore.writer

    def writer(self, key, expected_bytes=None):
        if any(key.startswith(f"step-{step:010d}/") for step in steps):
            raise StorageError("the disk is full", where=key)
        return usual(self, key, expected_bytes)

    monkeypatch.setattr(LocalStore, "writer", writer)
    return steps


def events(folder, name):
    lines = map(json.loads, (folder / "runs/a/events.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["event"] == name]


def test_two_failures_are_counted_and_training_goes_on(tmp_path, failing_steps):
    failing_steps |= {2, 3}
    result = run(run_config(tmp_path, checkpoint={"every": 1}))
    assert result.status == "finished" and len(column(tmp_path, "loss")) == 6
    assert manifests(tmp_path) == [f"step-{step:010d}" for step in (1, 4, 5, 6)]
    assert events(tmp_path, "checkpoint_failed") == [2, 3]
    assert events(tmp_path, "checkpoint") == [1, 4, 5, 6]


def test_failures_that_are_not_in_a_row_do_not_add_up(tmp_path, failing_steps):
    failing_steps |= {1, 2, 4, 5}
    assert run(run_config(tmp_path, checkpoint={"every": 1})).status == "finished"


def test_third_failure_in_a_row_ends_training(tmp_path, failing_steps):
    failing_steps |= {2, 3, 4}
    with pytest.raises(CheckpointError, match="not saved") as caught:
        run(run_config(tmp_path, checkpoint={"every": 1}))
    assert "the disk is full" in str(caught.value)
    assert len(journal(tmp_path)) == 5, "the save of step 4 runs behind step 5, and no further"
    assert manifests(tmp_path) == ["step-0000000001"]
    failing_steps.clear()
    assert run(run_config(tmp_path, checkpoint={"every": 1})).status == "finished"


def test_run_that_cannot_save_its_end_is_not_finished(tmp_path, failing_steps):
    failing_steps |= {6}
    with pytest.raises(CheckpointError, match="not saved"):
        run(run_config(tmp_path))
    failing_steps.clear()
    result = run(run_config(tmp_path))
    assert result.status == "finished" and manifests(tmp_path)[-1] == "step-0000000006"
    assert len(column(tmp_path, "loss")) == 6


def train_with_a_bad_rank(rank, world_size, config):
    usual = LocalWriter.write

    def write(self, data, **how):
        if rank == 1 and "step-0000000002" in str(self._path):
            raise StorageError("the disk of rank 1 is full")
        return usual(self, data, **how)

    LocalWriter.write = write
    try:
        return run_on_rank(rank, world_size, config)
    finally:
        LocalWriter.write = usual


def test_one_rank_that_cannot_write_fails_the_save_of_all_and_training_goes_on(ranks, tmp_path):
    results = ranks(2).run(train_with_a_bad_rank, run_config(tmp_path))
    assert [result.status for result in results] == ["finished", "finished"]
    assert manifests(tmp_path) == ["step-0000000004", "step-0000000006"]
    assert events(tmp_path, "checkpoint_failed") == [2]
    assert '"checkpoint_failed"' in (text := (tmp_path / "runs/a/events.jsonl").read_text()) and "rank 1:" in text


def test_error_on_every_rank_is_the_same(ranks, tmp_path):
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/checkpoints").write_text("a file in the way")
    told = ranks(2).run(try_on_rank, run_config(tmp_path))
    assert told[0] == told[1] and told[0][0] == "StorageError"
