"""A run that is asked to stop saves where it stands, on all ranks alike, and goes on from there."""

from __future__ import annotations

import pytest

from tests.support.runs import read_lines
from tests.train.runs import column, manifests, run, run_config, run_on_rank

STEPS = 6


class AskedAfter:
    """Says so from its `calls`-th call on, on one rank."""

    def __init__(self, calls: int, only_rank: int = 0, reason: str = "SIGTERM") -> None:
        self.calls, self.only_rank, self.reason, self.asked = calls, only_rank, reason, 0

    def __call__(self) -> str | None:
        self.asked += 1
        return self.reason if self.asked >= self.calls else None


def run_asked_on_rank(rank: int, world_size: int, config: dict, asked: AskedAfter):
    from raydz.train.attempt import Attempt

    attempt = Attempt(asked_to_stop=asked) if rank == asked.only_rank else None
    return run_on_rank(rank, world_size, config, {"attempt": attempt})


@pytest.mark.parametrize("saving", [{"every": 2}, {"every": 0, "at_end": False, "async_save": False}])
def test_all_ranks_stop_after_the_step_in_which_one_was_asked_and_save(ranks, tmp_path, saving):
    config = run_config(tmp_path, train={"steps": STEPS}, checkpoint=saving)
    results = ranks(2).run(run_asked_on_rank, config, AskedAfter(3, only_rank=1))
    assert [(result.status, result.step) for result in results] == [("stopped", 3)] * 2
    assert manifests(tmp_path)[-1] == "step-0000000003"
    assert len({result.checkpoint_uri for result in results}) == 1 and "step-0000000003" in results[0].checkpoint_uri


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    assert run(run_config(tmp_path, run={"name": "straight"})).status == "finished"
    from raydz.train.attempt import Attempt

    config = run_config(tmp_path)
    assert run(config, attempt=Attempt(asked_to_stop=AskedAfter(3))).step == 3
    result = run(config)
    assert (result.status, result.step) == ("finished", STEPS)
    assert column(tmp_path, "loss") == column(tmp_path, "loss", "straight")


@pytest.mark.slow
def test_mlflow_says_killed_and_why_and_then_finished(tmp_path):
    from mlflow import MlflowClient

    from raydz.train.attempt import Attempt

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = run_config(tmp_path, tracking={"mlflow": True, "mlflow_uri": uri})
    run_id = run(config, attempt=Attempt(asked_to_stop=AskedAfter(2))).mlflow_run_id
    stopped = MlflowClient(uri).get_run(run_id)
    assert stopped.info.status == "KILLED" and "stopped after step 2: SIGTERM" in stopped.data.tags["raydz.error"]
    assert run(config).mlflow_run_id == run_id
    assert MlflowClient(uri).get_run(run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_a_planned_stop_leaves_the_mlflow_run_running_for_the_attempt_after_it(tmp_path):
    from mlflow import MlflowClient

    from raydz.train.attempt import Attempt

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = run_config(tmp_path, tracking={"mlflow": True, "mlflow_uri": uri})
    asked = AskedAfter(2, reason="resize: room for 8 workers, 4 train")
    result = run(config, attempt=Attempt(asked_to_stop=asked))
    assert (result.status, result.step) == ("stopped", 2) and manifests(tmp_path)[-1] == "step-0000000002"
    paused = MlflowClient(uri).get_run(result.mlflow_run_id)
    assert paused.info.status == "RUNNING" and paused.data.tags["raydz.attempt.0.status"] == "PAUSED"
    assert "raydz.error" not in paused.data.tags
    assert len(MlflowClient(uri).get_metric_history(result.mlflow_run_id, "loss")) == 2, "all steps are there"

    assert run(config).mlflow_run_id == result.mlflow_run_id
    finished = MlflowClient(uri).get_run(result.mlflow_run_id)
    assert finished.info.status == "FINISHED" and finished.data.tags["raydz.attempt.0.status"] == "PAUSED"


@pytest.mark.parametrize(
    ("reason", "planned"),
    [("resize: room for 2", True), ("node drained: spot", True), ("SIGTERM", False), ("resized", False), (None, False)],
)
def test_some_reasons_end_the_group_and_not_the_run(reason, planned):
    from raydz.train.stopping import goes_on

    assert goes_on(reason) is planned


def test_a_planned_stop_is_an_event_and_no_end_of_the_run(tmp_path):
    from raydz.train.attempt import Attempt

    asked = AskedAfter(2, reason="resize: room")
    run(run_config(tmp_path), attempt=Attempt(asked_to_stop=asked))
    kinds = {event["event"]: event for event in read_lines(tmp_path / "runs" / "a" / "events.jsonl")}
    assert kinds["pause"]["reason"] == "resize: room" and "finish" not in kinds


def test_asked_in_the_last_step_the_run_is_finished(tmp_path):
    from raydz.train.attempt import Attempt

    assert run(run_config(tmp_path), attempt=Attempt(asked_to_stop=AskedAfter(STEPS))).status == "finished"
