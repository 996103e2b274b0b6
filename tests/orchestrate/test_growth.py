"""A group that is asked to make way for a larger one: by what it claims, when, and with which word."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from raydz.config import load
from raydz.orchestrate import growth
from raydz.orchestrate.board import Standing
from raydz.orchestrate.growth import GrowthWatch
from raydz.train.stopping import goes_on

ALLOWED = (1, 2, 3, 4)


class FakeBoard:
    """Answers at once, and keeps what it is asked."""

    def __init__(self, standing: Standing, now: float) -> None:
        self.asked: list[str] = []
        self.glance = SimpleNamespace(remote=lambda: (standing, now))
        self.ask_to_stop = SimpleNamespace(remote=self.asked.append)


class FakeClaims:
    def __init__(self) -> None:
        self.wanted: list[int] = []
        self.placed = 0

    def want(self, parts) -> None:
        self.wanted = list(parts)

    def release(self) -> None:
        self.wanted, self.placed = [], 0


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(growth, "ray", SimpleNamespace(get=lambda answer, timeout: answer))

    def make(standing: Standing, now: float, size: int = 2) -> tuple[GrowthWatch, FakeBoard]:
        scaling = {"num_workers": [1, 4], "grow_after_s": 60.0}
        config = load({"scaling": scaling, "train": {"steps": 100}, "train_batch_size": 8})
        board = FakeBoard(standing, now)
        return GrowthWatch(board, config, {"CPU": 1.0}, ALLOWED, size), board

    return make


def trained(step: int, seconds_a_step: float = 10.0) -> Standing:
    times = deque([seconds_a_step] * 3)
    return Standing(created_at=0.0, step=step, step_at=100.0, first_step_at=100.0, step_times_s=times)


def test_it_claims_a_place_for_each_missing_worker_and_asks_once_there_is_steady_room(watch) -> None:
    watcher, board = watch(trained(20), now=200.0)
    claims = FakeClaims()
    for placed in (0, 1, 1):
        claims.placed = placed
        watcher._look(claims)
    assert claims.wanted == [1, 1] and watcher.wanted == 3
    assert board.asked == ["resize: room for 3 workers, 2 train"] and goes_on(board.asked[0])


def test_nothing_is_claimed_before_a_group_has_trained_for_a_while_and_when_it_is_nearly_done(watch) -> None:
    early, late = watch(trained(20), now=150.0), watch(trained(95), now=5000.0)
    for watcher, board in (early, late, watch(Standing(created_at=0.0), now=500.0)):
        claims = FakeClaims()
        claims.wanted, claims.placed = [1, 1], 2
        watcher._look(claims)
        assert claims.wanted == [] and board.asked == [] and watcher.wanted is None


def test_a_group_of_the_most_workers_is_not_watched(watch) -> None:
    watcher, _ = watch(trained(20), now=500.0, size=4)
    with watcher:
        assert not watcher._thread.is_alive()
