"""Decisions after a failure, without a cluster."""

from __future__ import annotations

import pytest

from raydz.config.cluster import FailureConfig
from raydz.errors import CheckpointError, DataError, TrainingError
from raydz.orchestrate.failures import Failure, Kind
from raydz.orchestrate.policy import GiveUp, Restart, decide
from raydz.storage import StoreUnavailable

DEFAULTS = FailureConfig()


def failure(kind: Kind = Kind.KILLED, *, at: float = 0.0, step: int | None = 5, began: int = 0, error=None) -> Failure:
    return Failure(kind, at, step, began, "a worker died", error)


def at_steps(*steps: int, kind: Kind = Kind.KILLED, apart_s: float = 10.0) -> list[Failure]:
    return [failure(kind, at=apart_s * index, step=step) for index, step in enumerate(steps)]


@pytest.mark.parametrize(
    "kind",
    [Kind.EXCEPTION, Kind.KILLED, Kind.OUT_OF_MEMORY, Kind.NODE_LOST, Kind.NODE_DRAINED, Kind.HANG, Kind.NO_START],
)
def test_the_first_failure_of_each_kind_is_a_restart_from_the_newest_checkpoint(kind: Kind) -> None:
    decision = decide([failure(kind)], DEFAULTS)
    assert isinstance(decision, Restart)
    assert (decision.before_step, decision.skips, decision.pause_s) == (None, frozenset(), 0.0)


def test_the_budget_counts_the_failures_of_its_window_alone() -> None:
    config = FailureConfig(max_failures=2, window_s=100.0)
    assert isinstance(decide(at_steps(1, 2), config), Restart)
    decision = decide(at_steps(1, 2, 3), config)
    assert isinstance(decision, GiveUp) and "failure.max_failures" in decision.reason and decision.error is None
    assert isinstance(decide(at_steps(1, 2, 3, apart_s=60.0), config), Restart), "one every minute is within it"
    assert isinstance(decide(at_steps(1), FailureConfig(max_failures=0)), GiveUp)


def test_drained_nodes_are_planned_and_cost_nothing() -> None:
    drained = at_steps(1, 2, 3, 4, 5, kind=Kind.NODE_DRAINED)
    assert isinstance(decide(drained, FailureConfig(max_failures=0)), Restart)


def test_what_a_restart_cannot_mend_ends_the_run_with_the_error_itself() -> None:
    error = DataError("no such file")
    decision = decide([failure(Kind.ERROR, error=error)], DEFAULTS)
    assert isinstance(decision, GiveUp) and decision.error is error


def test_a_store_that_may_come_back_is_a_restart() -> None:
    assert isinstance(decide([failure(Kind.ERROR, error=StoreUnavailable("503"))], DEFAULTS), Restart)


def test_a_step_that_fails_again_and_again_stops_the_run_or_is_left_out() -> None:
    failures = at_steps(7, 7, 7)
    assert isinstance(decide(failures[:2], FailureConfig(max_failures=9)), Restart)
    stopped = decide(failures, FailureConfig(max_failures=9))
    assert isinstance(stopped, GiveUp) and "step 8 failed 3 times in a row" in stopped.reason
    skipped = decide(failures, FailureConfig(max_failures=9, on_poison="skip"))
    assert isinstance(skipped, Restart) and skipped.skips == {8}


def test_failures_elsewhere_interrupt_the_row_and_lost_nodes_do_not() -> None:
    config = FailureConfig(max_failures=9)
    assert isinstance(decide(at_steps(7, 7, 4, 7), config), Restart)
    with_node = [*at_steps(7, 7), failure(Kind.NODE_LOST, at=15.0, step=2), failure(at=20.0, step=7)]
    assert isinstance(decide(with_node, config), GiveUp)
    assert isinstance(decide(at_steps(7, 7, 7, kind=Kind.NODE_LOST), config), Restart), "no batch loses a node"


def test_attempts_that_made_no_step_fail_at_the_one_after_their_checkpoint() -> None:
    failures = [failure(step=None, began=10), failure(step=10, began=0), failure(step=None, began=10)]
    decision = decide(failures, FailureConfig(max_failures=9))
    assert isinstance(decision, GiveUp) and "step 11 failed 3 times" in decision.reason


def test_a_damaged_checkpoint_stops_the_run_or_an_older_one_is_taken() -> None:
    error = CheckpointError("chunk 3 is damaged")
    bad = [failure(Kind.BAD_CHECKPOINT, step=None, began=20, error=error)]
    stopped = decide(bad, DEFAULTS)
    assert isinstance(stopped, GiveUp) and stopped.error is error
    older = decide(bad, FailureConfig(on_bad_checkpoint="previous"))
    assert isinstance(older, Restart) and older.before_step == 20
    last = decide([failure(Kind.BAD_CHECKPOINT, step=None, began=0)], FailureConfig(on_bad_checkpoint="previous"))
    assert isinstance(last, GiveUp)


def test_groups_that_do_not_start_are_tried_at_growing_intervals() -> None:
    config = FailureConfig(max_failures=99)
    failures = [failure(Kind.NO_START, at=float(n), step=None) for n in range(9)]
    pauses = [decide(failures[: n + 1], config).pause_s for n in range(9)]
    assert pauses == [0, 2, 4, 8, 16, 32, 60, 60, 60]
    assert decide([*failures, failure(at=10.0)], config).pause_s == 0


def test_the_reason_says_what_happened() -> None:
    decision = decide(at_steps(3), DEFAULTS)
    assert decision.reason == "failure 1 of at most 3: killed: a worker died"


def test_an_error_that_may_be_retried_ends_with_itself_when_the_budget_does() -> None:
    error = TrainingError("a collective failed")
    error.retryable = True
    decision = decide([failure(Kind.ERROR, error=error)], FailureConfig(max_failures=0))
    assert isinstance(decision, GiveUp) and decision.error is error


def test_a_group_for_which_there_was_no_room_costs_nothing_and_waits_longer_each_time() -> None:
    failures = [failure(Kind.NO_ROOM, at=float(n), step=None) for n in range(9)]
    decisions = [decide(failures[: n + 1], FailureConfig(max_failures=0)) for n in range(9)]
    assert [decision.pause_s for decision in decisions] == [0, 2, 4, 8, 16, 32, 60, 60, 60]
