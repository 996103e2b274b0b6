"""What the driver makes of a rank's end while the group lives, with a board that needs no Ray."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydz.config import load
from raydz.dist.collectives import PeerLost
from raydz.errors import CheckpointError, DataError
from raydz.orchestrate import board as board_module
from raydz.orchestrate import referee as referee_module
from raydz.orchestrate.board import Board, Standing
from raydz.orchestrate.failures import Kind
from raydz.orchestrate.referee import Referee, failure_of
from raydz.orchestrate.rounds import Report
from raydz.orchestrate.worker import WorkerTask
from tests.support.runs import small_config

KILLED = Report(1, "killed", "rank 1 was ended by SIGKILL")
ECHO = Report(0, "raised", "a collective failed", pickle.dumps(PeerLost("a collective failed")), is_echo=True)


class NearBoard:
    """A board in this process: `.remote()` gives what `ray.get` of a real one would."""

    def __init__(self) -> None:
        self.board = Board()
        self.loop = asyncio.new_event_loop()
        self.present = {0, 1}

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            if name == "roll_call":
                self.loop.call_later(0.01, self._answer)
            found = getattr(self.board, name)(*arguments)
            return self.loop.run_until_complete(found) if asyncio.iscoroutine(found) else found

        return SimpleNamespace(remote=remote)

    def _answer(self) -> None:
        """As living supervisors do."""
        for rank in self.present:
            self.board.answer_roll(rank, self.board._rounds.view.roll)


@pytest.fixture
def near(monkeypatch) -> Iterator[NearBoard]:
    monkeypatch.setattr(referee_module.ray, "get", lambda found, timeout=None: found)
    monkeypatch.setattr(referee_module.ray, "nodes", lambda: [{"NodeID": name, "Alive": True} for name in "ab"])
    monkeypatch.setattr(referee_module, "_LOOK_S", 0.05)
    near = NearBoard()
    yield near
    near.loop.close()


def referee_of(near: NearBoard, root: Path, **failure: Any) -> Referee:
    task = WorkerTask(load(small_config(root, "run", failure=failure)), None, None, near)
    return Referee(near, SimpleNamespace(take_found=lambda: None), [], task, 2)


def wait_for(condition, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def test_a_killed_rank_is_a_new_round_and_a_failure_of_the_run(near, tmp_path) -> None:
    near.board.post_began(4)
    near.board.post_step(7)
    with referee_of(near, tmp_path) as referee:
        near.board.report(0, KILLED)
        wait_for(lambda: near.board._rounds.number == 1)
    order = near.board._rounds.view.order
    assert order.failures == 1 and order.interruption["last_step"] == 7
    [told] = order.interruption["failures"]
    assert (told["kind"], told["failed_step"], told["in_place"], told["decision"]) == ("killed", 8, True, "restart")
    assert [failure.kind for failure in referee._failures] == [Kind.KILLED]
    assert near.board.standing()[0].step is None, "the new round stands at no step yet"
    carried = referee.carry(referee._task)
    assert carried.number == 1 and carried.interruption.last_step == 7


def test_the_cause_is_waited_for_when_only_its_echo_has_come(near, tmp_path) -> None:
    with referee_of(near, tmp_path) as referee:
        near.board.report(0, ECHO)
        time.sleep(0.2)
        near.board.report(0, KILLED)
        wait_for(lambda: near.board._rounds.number == 1)
    assert referee._failures[0].cause == KILLED.cause


def test_an_echo_alone_is_a_failure_after_a_while(near, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(referee_module, "_ECHO_S", 0.1)
    with referee_of(near, tmp_path) as referee:
        near.board.report(0, ECHO)
        wait_for(lambda: near.board._rounds.number == 1)
    assert referee._failures[0].kind is Kind.ERROR


@pytest.mark.parametrize(("node", "kind"), [("gone", Kind.NODE_LOST), ("b", Kind.KILLED)])
def test_an_echo_without_the_peers_supervisor_ends_the_attempt_as_that(near, tmp_path, monkeypatch, node, kind) -> None:
    """No round could begin there. Ray may know by then that the node has died: no batch is to blame."""
    monkeypatch.setattr(referee_module, "_ROLL_S", 0.1)
    near.present = {0}
    near.board.join(0, "a")
    near.board.join(1, node)
    with referee_of(near, tmp_path) as referee:
        near.board.report(0, ECHO)
        wait_for(lambda: near.board._rounds.view.end is not None, limit_s=2.0)
        wait_for(lambda: referee.given_up is not None)
    assert (referee.given_up.kind, referee.given_up.cause) == (kind, "the workers of ranks 1 have gone")
    assert near.board._rounds.number == 0 and referee._failures == []


@pytest.mark.parametrize("kind", ["fatal", "budget", "stopping"])
def test_what_a_restart_does_not_mend_ends_the_attempt(near, tmp_path, kind) -> None:
    report = Report(1, "raised", "bad", pickle.dumps(DataError("bad"))) if kind == "fatal" else KILLED
    if kind == "stopping":
        near.board.ask_to_stop("SIGTERM")
    with referee_of(near, tmp_path, max_failures=0 if kind == "budget" else 3) as referee:
        near.board.report(0, report)
        wait_for(lambda: near.board._rounds.view.end is not None)
        wait_for(lambda: referee.given_up is not None)
    assert near.board._rounds.view.end == "given up" and near.board._rounds.number == 0
    assert referee._failures == [], "the attempt's own end counts it"


def test_one_fault_seen_by_the_referee_and_as_the_groups_end_is_one_failure(near, tmp_path) -> None:
    with referee_of(near, tmp_path) as referee:
        near.board.report(0, KILLED)
        wait_for(lambda: near.board._rounds.number == 1)
    referee.forget_unfinished(Standing())
    assert referee._failures == []


def test_a_round_that_trained_keeps_its_failure(near, tmp_path) -> None:
    with referee_of(near, tmp_path) as referee:
        near.board.report(0, KILLED)
        wait_for(lambda: near.board._rounds.number == 1)
    referee.forget_unfinished(Standing(began=4))
    assert len(referee._failures) == 1


def test_with_in_place_off_nothing_looks(near, tmp_path) -> None:
    with referee_of(near, tmp_path, in_place=False):
        near.board.report(0, KILLED)
        time.sleep(0.3)
    assert near.board._rounds.number == 0 and near.board._rounds.view.end is None


@pytest.mark.parametrize(
    ("report", "began", "hang", "kind"),
    [
        (KILLED, 4, None, Kind.KILLED),
        (KILLED, 4, "rank 1 made no progress", Kind.HANG),
        (Report(1, "out of memory", "the host was out of memory"), 4, None, Kind.OUT_OF_MEMORY),
        (Report(1, "raised", "rank 1: ZeroDivisionError: a bug"), 4, None, Kind.EXCEPTION),
        (Report(1, "raised", "x", pickle.dumps(CheckpointError("damaged"))), None, None, Kind.BAD_CHECKPOINT),
        (Report(1, "raised", "x", pickle.dumps(CheckpointError("not saved"))), 4, None, Kind.ERROR),
    ],
)
def test_kinds_are_those_of_a_groups_end(report, began, hang, kind) -> None:
    found = failure_of(report, Standing(chose=4, began=began, step=9), hang, 1.0)
    assert (found.kind, found.began_at_step, found.step) == (kind, 4, 9)


def test_word_from_an_earlier_round_does_not_reach_the_standing() -> None:
    board = Board()
    board.begin_round(board_module.Order(1))
    board.relay(0, "post_step", 12)
    assert board.standing()[0].step is None
    board.relay(1, "post_step", 5)
    assert board.standing()[0].step == 5
