"""What the driver hands to the next attempt, from what the board knew; without a cluster."""

from __future__ import annotations

import json
from pathlib import Path

from raydz.errors import TrainingError
from raydz.orchestrate.board import Standing
from raydz.orchestrate.failures import Failure, Kind
from raydz.orchestrate.interruption import describe_failure, interrupted, planned, tell
from raydz.orchestrate.policy import GiveUp, Restart

KILLED = Failure(Kind.KILLED, at=3.0, step=14, began_at_step=10, cause="SIGKILL")
TRAINED = Standing(created_at=900.0, began=10, began_at=950.0, step=14, step_at=1000.0)


def event_at(seen_at: float) -> dict:
    return describe_failure(KILLED, Restart("failure 1 of at most 3"), 1, seen_at)


def test_an_event_says_kind_cause_and_what_was_decided() -> None:
    assert event_at(1002.5004) == {
        "number": 1, "kind": "killed", "cause": "SIGKILL", "error": None, "failed_step": 15, "began_at_step": 10,
        "seen_at": 1002.5, "decision": "restart", "reason": "failure 1 of at most 3",
    }  # fmt: skip
    typed = Failure(Kind.ERROR, 3.0, 14, 10, "x" * 900, TrainingError("x"))
    given_up = describe_failure(typed, GiveUp("too many"), 4, 1.0)
    assert (given_up["decision"], given_up["error"], len(given_up["cause"])) == ("give up", "TrainingError", 500)


def test_detection_counts_from_the_last_step_on_the_clock_of_the_board() -> None:
    found = interrupted(None, event_at(5000.0), TRAINED, board_now=1002.5)
    assert (found.last_step, found.detect_s, found.seen_at) == (14, 2.5, 5000.0)


def test_attempts_that_end_no_step_prolong_the_interruption() -> None:
    first = interrupted(None, event_at(1002.5), TRAINED, board_now=1002.5)
    loaded = Standing(created_at=1005.0, began=10, began_at=1010.0)
    second = interrupted(first, event_at(1020.0), loaded, board_now=1020.0)
    assert (second.last_step, second.detect_s, second.seen_at) == (14, 2.5, 1002.5)
    assert [failure["seen_at"] for failure in second.failures] == [1002.5, 1020.0]
    trained_again = Standing(created_at=1021.0, began=10, began_at=1025.0, step=11, step_at=1026.0)
    third = interrupted(second, event_at(1027.0), trained_again, board_now=1027.0)
    assert (third.last_step, third.detect_s, len(third.failures)) == (11, 1.0, 1)


def test_a_run_that_never_made_a_step_counts_from_its_last_sign_of_progress() -> None:
    loaded = interrupted(None, event_at(0.0), Standing(created_at=900.0, began=10, began_at=950.0), board_now=960.0)
    assert (loaded.last_step, loaded.detect_s) == (10, 10.0)
    nothing = interrupted(None, event_at(0.0), Standing(created_at=900.0), board_now=960.0)
    assert nothing.detect_s == 60.0


def test_the_workers_of_the_group_that_trained_are_those_before_a_resize() -> None:
    first = interrupted(None, event_at(1002.5), TRAINED, 1002.5, workers=4)
    assert (first.workers, first.why) == (4, "killed: SIGKILL")
    loaded = Standing(created_at=1005.0, began=10, began_at=1010.0)
    second = interrupted(first, {**event_at(1020.0), "kind": "no room"}, loaded, 1020.0, workers=3)
    assert (second.workers, second.why) == (4, "no room: SIGKILL"), "three never made a step"
    assert interrupted(None, event_at(0.0), loaded, 1020.0, workers=3).workers == 0


def test_a_planned_stop_is_no_failure_and_begins_at_the_last_step() -> None:
    stop = planned("resize: room for 8 workers", TRAINED, board_now=1003.0, workers=4)
    assert (stop.failures, stop.last_step, stop.detect_s, stop.workers) == ((), 14, 3.0, 4)
    assert stop.why == "resize: room for 8 workers"


def test_the_driver_writes_the_event_where_the_run_is(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"event":"start","attempt":0}\n{"event":"start","attempt":1}\n{"event":"st')
    tell(tmp_path, {**event_at(1.0), "cause": "password=hunter22"})
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert (lines[2]["event"], lines[2]["attempt"], lines[2]["kind"]) == ("failure", 1, "killed")
    assert "hunter22" not in events.read_text()
    tell(tmp_path / "elsewhere", event_at(1.0))
    assert not (tmp_path / "elsewhere").exists(), "a run of another host leaves nothing here"
