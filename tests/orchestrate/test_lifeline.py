"""A worker that cannot reach its driver ends itself, and asks no more often than one board can answer."""

from __future__ import annotations

import threading
import time

import pytest

from raydz.orchestrate import lifeline
from raydz.orchestrate.lifeline import Lifeline, ask_every_s


class Answers:
    """Stands for `ray.get` of the board's answer."""

    def __init__(self, monkeypatch) -> None:
        self.is_there, self.num_asked = True, 0
        monkeypatch.setattr(lifeline.ray, "get", self.get)

    @property
    def stop_reason(self):
        return self

    def remote(self) -> None:
        self.num_asked += 1

    def get(self, reference, timeout: float) -> None:
        if not self.is_there:
            time.sleep(timeout)
            raise TimeoutError


@pytest.fixture
def answers(monkeypatch) -> Answers:
    return Answers(monkeypatch)


def test_silence_beyond_the_limit_ends_the_worker(answers):
    ended, errors = threading.Event(), []
    with Lifeline(answers, 0.4, 1, lambda error: (errors.append(error), ended.set())):
        time.sleep(0.8)
        assert not ended.is_set(), "the driver answers"
        answers.is_there, cut_at = False, time.monotonic()
        assert ended.wait(5.0)
    assert 0.3 < time.monotonic() - cut_at < 2.0
    assert "lost its driver" in str(errors[0]) and "failure.lost_driver_s" in str(errors[0])


def test_a_short_silence_is_forgiven(answers):
    ended = threading.Event()
    with Lifeline(answers, 0.8, 1, lambda error: ended.set()):
        for _ in range(3):
            answers.is_there = False
            time.sleep(0.3)
            answers.is_there = True
            time.sleep(0.5)
        assert not ended.is_set()


def test_zero_is_never(answers):
    with Lifeline(answers, 0.0, 1):
        time.sleep(0.1)
    assert answers.num_asked == 0


def test_the_board_is_asked_by_all_workers_together_a_few_times_a_second():
    for world_size in (1, 8, 64, 1024, 10000):
        assert world_size / ask_every_s(120.0, world_size) <= 6
    assert ask_every_s(120.0, 1) == 30.0
