"""Kinds of failures, read from real exceptions of Ray's classes."""

from __future__ import annotations

import pytest
import ray.exceptions
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)

from raydz.dist.collectives import PeerLost
from raydz.errors import CheckpointError, DataError, PlacementError, TrainingError
from raydz.orchestrate.failures import Failure, Kind, causes, classify

NODE = "The actor died because its node has died. Node Id: 12ab"
MEMORY = "Task was killed due to the node running low on memory."


def of_workers(*errors: Exception) -> WorkerGroupError:
    return WorkerGroupError("\n".join(map(str, errors)), dict(enumerate(errors)))


def died(message: str) -> Exception:
    error = ray.exceptions.ActorDiedError()
    error.error_msg = message
    error.args = (message,)
    return WorkerHealthCheckFailedError("A worker health check failed.", error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (of_workers(ValueError("a bug")), Kind.EXCEPTION),
        (of_workers(died("SIGKILL")), Kind.KILLED),
        (of_workers(died(NODE)), Kind.NODE_LOST),
        (of_workers(died("the actor's node was terminated unexpectedly: x"), ValueError("peer")), Kind.NODE_LOST),
        (of_workers(died("the actor's node was terminated expectedly: preempted, spot")), Kind.NODE_DRAINED),
        (of_workers(ray.exceptions.OutOfMemoryError(MEMORY)), Kind.OUT_OF_MEMORY),
        (of_workers(WorkerHealthCheckTimeoutError("no answer for 30 s")), Kind.HANG),
        (ControllerError(WorkerGroupStartupTimeoutError(4)), Kind.NO_ROOM),
        (RuntimeError("something of Ray's"), Kind.EXCEPTION),
    ],
)
def test_what_ray_says_is_a_kind(error: Exception, kind: Kind) -> None:
    assert classify(error, None, had_begun=True)[0] is kind


def test_a_typed_error_counts_before_what_ray_saw() -> None:
    killed = of_workers(died("SIGKILL"))
    assert classify(killed, DataError("no such file"), had_begun=True) == (Kind.ERROR, "no such file")
    assert classify(killed, PlacementError("too few GPUs"), had_begun=False)[0] is Kind.NO_START
    assert classify(killed, TrainingError("out of memory while training"), had_begun=True)[0] is Kind.OUT_OF_MEMORY


def test_a_rank_that_lost_its_peer_does_not_hide_why_the_peer_died() -> None:
    assert classify(of_workers(died(NODE)), PeerLost("a collective failed"), had_begun=True)[0] is Kind.NODE_LOST
    assert classify(of_workers(ValueError("x")), PeerLost("a collective failed"), had_begun=True)[0] is Kind.ERROR


def test_a_checkpoint_error_before_the_first_step_is_a_bad_checkpoint_and_later_an_error() -> None:
    error = CheckpointError("chunk 3 is damaged")
    assert classify(of_workers(error), error, had_begun=False)[0] is Kind.BAD_CHECKPOINT
    assert classify(of_workers(error), error, had_begun=True)[0] is Kind.ERROR


def test_all_that_was_wrapped_is_found_once() -> None:
    inner = ValueError("inner")
    outer = of_workers(inner)
    inner.__cause__ = outer  # a ring
    assert list(causes(outer)) == [outer, inner]


def test_the_failed_step_is_the_one_after_the_newest() -> None:
    assert Failure(Kind.KILLED, 0.0, 12, 10, "").failed_step == 13
    assert Failure(Kind.KILLED, 0.0, None, 10, "").failed_step == 11
