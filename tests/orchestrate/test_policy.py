"""Decisions after a failure, without a cluster."""

from __future__ import annotations

from raydz.errors import DataError
from raydz.orchestrate.policy import GiveUp, Restart, decide
from raydz.storage import StoreUnavailable


def test_a_dead_worker_is_a_restart_within_the_budget() -> None:
    assert isinstance(decide(1, 3, None, "a worker died"), Restart)
    assert isinstance(decide(3, 3, None, "a worker died"), Restart)


def test_the_budget_ends() -> None:
    decision = decide(4, 3, None, "a worker died")
    assert isinstance(decision, GiveUp) and "failure.max_failures" in decision.reason and decision.error is None
    assert isinstance(decide(1, 0, None, "a worker died"), GiveUp)


def test_what_a_restart_cannot_mend_ends_the_run_with_the_error_itself() -> None:
    error = DataError("no such file")
    decision = decide(1, 3, error, "")
    assert isinstance(decision, GiveUp) and decision.error is error


def test_a_store_that_may_come_back_is_a_restart() -> None:
    assert isinstance(decide(1, 3, StoreUnavailable("503"), ""), Restart)
