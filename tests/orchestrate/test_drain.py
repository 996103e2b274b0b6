"""A node that is drained: only a group with a rank there is asked to stop, and as one that goes on."""

from __future__ import annotations

import threading
import time

import pytest

from raydz.orchestrate import drain
from raydz.orchestrate.board import Beat, Standing
from raydz.orchestrate.drain import DrainWatch, leaving
from raydz.train.stopping import goes_on


def standing_on(*nodes: str) -> Standing:
    beats = {rank: (Beat(rank, 100 + rank, node, 3, 10, None), 0.0) for rank, node in enumerate(nodes)}
    return Standing(beats=beats)


def test_only_nodes_with_a_rank_concern_the_run():
    standing = standing_on("a", "b", "b")
    assert leaving(standing, {}) == [] and leaving(standing, {"c": 0}) == []
    assert leaving(standing, {"b": 0, "c": 0}) == ["b"]
    assert leaving(Standing(), {"b": 0}) == [], "no rank has spoken yet"


class FakeBoard:
    """Answers as the actor would, through a stand-in for `ray.get`."""

    def __init__(self, standing: Standing) -> None:
        self.asked: list[str] = []
        self.stopped = threading.Event()
        self._standing = standing
        self.standing = _Method(lambda: (self._standing, 0.0))
        self.ask_to_stop = _Method(self._ask)

    def _ask(self, reason: str) -> None:
        self.asked.append(reason)
        self.stopped.set()


class _Method:
    def __init__(self, function) -> None:
        self.remote = function


@pytest.fixture
def draining(monkeypatch) -> dict[str, int]:
    nodes: dict[str, int] = {}
    monkeypatch.setattr(drain, "_POLL_S", 0.02)
    monkeypatch.setattr(drain, "draining_nodes", lambda: dict(nodes))
    monkeypatch.setattr(drain.ray, "get", lambda value, timeout=None: value)
    return nodes


def test_the_group_is_asked_once_and_for_a_reason_that_goes_on(draining):
    board = FakeBoard(standing_on("a", "b"))
    with DrainWatch(board) as watch:
        draining["elsewhere"] = 0
        time.sleep(0.2)
        assert board.asked == []
        draining["b"] = 0
        assert board.stopped.wait(5.0)
        watch._thread.join(5.0)
    assert board.asked == ["node drained: b"] and goes_on(board.asked[0])


def test_a_head_that_does_not_answer_is_asked_again(draining, monkeypatch):
    board, answers = FakeBoard(standing_on("b")), iter([RuntimeError("the head is away"), {"b": 0}])

    def ask() -> dict[str, int]:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(drain, "draining_nodes", ask)
    with DrainWatch(board):
        assert board.stopped.wait(5.0)
