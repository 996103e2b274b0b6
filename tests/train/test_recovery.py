"""What a failure cost, reckoned from given times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raydz.tracking import Tracker, append_event
from raydz.train.recovery import Interruption, recovery_of, untold, watch_recovery

FAILURE = {"number": 1, "kind": "killed", "cause": "SIGKILL", "seen_at": 1002.5}
INTERRUPTION = Interruption((FAILURE,), last_step=14, detect_s=2.5, seen_at=1002.5)


def start(run_dir: Path, attempt: int, step: int = 0, mlflow_uri: str | None = None) -> Tracker:
    return Tracker.start(
        run_dir=run_dir, run_key="r", run_name="r", config_text="", params={}, mlflow_uri=mlflow_uri, experiment="e",
        resume_step=step, attempt=attempt,
    )  # fmt: skip


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_phases_add_up_from_the_last_step_to_the_first_one() -> None:
    recovery = recovery_of(INTERRUPTION, 10, (1008.0, 1009.5, 1010.0), {})
    assert recovery.phases_s == {"detect": 2.5, "start": 5.5, "load": 1.5, "first_step": 0.5}
    assert recovery.as_metrics() == {
        "restarts": 1.0, "lost_steps": 4.0, "recovery_s": 10.0, "recovery_s/detect": 2.5, "recovery_s/start": 5.5,
        "recovery_s/load": 1.5, "recovery_s/first_step": 0.5,
    }  # fmt: skip


def test_counts_go_on_over_the_run_and_failures_in_a_row_are_one_recovery() -> None:
    twice = Interruption((FAILURE, FAILURE), last_step=14, detect_s=2.5, seen_at=1002.5)
    recovery = recovery_of(twice, 10, (1008.0, 1009.5, 1010.0), {"restarts": 3, "lost_steps": 7})
    assert (recovery.restarts, recovery.lost_steps) == (5, 11)


def test_clocks_that_differ_make_no_negative_phase() -> None:
    recovery = recovery_of(INTERRUPTION, 14, (1001.0, 1009.5, 1010.0), {})
    assert recovery.phases_s["start"] == 0.0 and recovery.lost_steps == 0


def test_only_failures_that_nobody_wrote_are_told() -> None:
    other = {**FAILURE, "seen_at": 1007.0}
    assert untold([FAILURE, other], [{"event": "failure", "seen_at": 1002.5}, {"event": "start"}]) == [other]


@pytest.mark.parametrize("is_reachable", [True, False])
def test_the_next_attempt_has_one_event_of_the_failure_and_one_of_the_recovery(tmp_path: Path, is_reachable) -> None:
    start(tmp_path, 0).finish("KILLED")
    if is_reachable:
        assert append_event(tmp_path, "failure", FAILURE)
    tracker = start(tmp_path, 1, 10)
    watch = watch_recovery(tracker, tmp_path, INTERRUPTION, 10, (1008.0, 1009.5))
    first, second = watch.step_ended(11), watch.step_ended(12)
    assert first == second and first["restarts"] == 1.0, "later steps have it, too: MLflow may know the first already"
    tracker.log_step(11, first)
    tracker.finish("FINISHED")
    [failure] = events(tmp_path, "failure")
    assert {**FAILURE, "attempt": 0 if is_reachable else 1}.items() <= failure.items()
    [recovered] = events(tmp_path, "recovered")
    assert (recovered["step"], recovered["from_step"], recovered["kind"]) == (11, 10, "killed")
    assert recovered["recovery_s"]["start"] == 5.5


def test_a_later_recovery_counts_the_earlier_ones_of_the_run(tmp_path: Path) -> None:
    for attempt in (0, 1, 2):
        tracker = start(tmp_path, attempt, 10)
        if attempt:
            failed = {**FAILURE, "seen_at": 1000.0 + attempt}
            interruption = Interruption((failed,), last_step=12, detect_s=1.0, seen_at=1000.0)
            watch_recovery(tracker, tmp_path, interruption, 10, (1001.0, 1002.0)).step_ended(11)
        tracker.finish("KILLED")
    counts = [(event["restarts"], event["lost_steps"]) for event in events(tmp_path, "recovered")]
    assert counts == [(1, 2), (2, 4)]


@pytest.mark.parametrize("failures", [(FAILURE,), ()], ids=["after a failure", "planned"])
def test_another_number_of_workers_is_an_event_with_its_cost(tmp_path: Path, failures) -> None:
    tracker = start(tmp_path, 1, 10)
    interruption = Interruption(failures, last_step=10, detect_s=2.5, seen_at=1002.5, workers=4, why="resize: room")
    metrics = watch_recovery(tracker, tmp_path, interruption, 10, (1008.0, 1009.5), world_size=8).step_ended(11)
    tracker.finish("FINISHED")
    [resized] = events(tmp_path, "resized")
    assert (resized["from"], resized["to"], resized["why"]) == (4, 8, "resize: room")
    assert (resized["step"], resized["from_step"], resized["restarts"]) == (11, 10, len(failures))
    assert resized["recovery_s"]["start"] == metrics["recovery_s/start"] == 5.5
    assert metrics["restarts"] == len(failures), "a planned stop is not a failure"
    assert len(events(tmp_path, "recovered")) == len(failures)


def test_the_same_number_of_workers_after_a_planned_stop_has_moved(tmp_path: Path) -> None:
    tracker = start(tmp_path, 1, 10)
    stop = Interruption((), last_step=10, detect_s=2.5, seen_at=1002.5, workers=4, why="node drained: n1")
    watch_recovery(tracker, tmp_path, stop, 10, (1008.0, 1009.5), world_size=4).step_ended(11)
    tracker.finish("FINISHED")
    [moved] = events(tmp_path, "moved")
    assert (moved["why"], moved["lost_steps"]) == ("node drained: n1", 0)
    assert events(tmp_path, "resized") == events(tmp_path, "recovered") == []


def test_counts_go_on_after_a_resize(tmp_path: Path) -> None:
    for attempt, (failures, last_step) in enumerate([((FAILURE,), 12), ((), 14), ((FAILURE,), 13)]):
        tracker = start(tmp_path, attempt + 1, 10)
        stop = Interruption(failures, last_step, 1.0, 1002.5, workers=4, why="x")
        watch_recovery(tracker, tmp_path, stop, 10, (1008.0, 1009.5), world_size=8).step_ended(11)
        tracker.finish("KILLED")
    counts = [(event["restarts"], event["lost_steps"]) for event in events(tmp_path, "resized")]
    assert counts == [(1, 2), (1, 6), (2, 9)], "a planned stop whose save failed loses steps, too"


@pytest.mark.slow
def test_mlflow_has_the_failure_of_the_attempt_as_a_tag(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    start(tmp_path, 0, mlflow_uri=uri).finish("KILLED")
    tracker = start(tmp_path, 1, 10, mlflow_uri=uri)
    watch_recovery(tracker, tmp_path, INTERRUPTION, 10, (1008.0, 1009.5))
    tracker.finish("FINISHED")
    client = MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.data.tags["raydz.attempt.0.failure"] == "killed: SIGKILL"
