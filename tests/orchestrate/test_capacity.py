"""The choice of how many workers start, over time, on a cluster that is only told: nothing of Ray is in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raydz.config import load
from raydz.orchestrate import capacity
from raydz.orchestrate.capacity import Room
from raydz.orchestrate.sizing import allowed_sizes

WORKER = {"CPU": 1.0}


class Nodes:
    """CPUs of the one node, by the clock; and what claims there were."""

    def __init__(self, cpus: Callable[[float], int]) -> None:
        self.cpus, self.now, self.claimed = cpus, 0.0, []

    def free_by_node(self) -> dict[str, dict[str, float]]:
        return {"n": {"CPU": float(self.cpus(self.now))}}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def claims(self, per_worker) -> FakeClaims:
        assert per_worker == WORKER
        return FakeClaims(self)


class FakeClaims:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._parts = nodes, []

    def want(self, parts) -> None:
        self._parts = list(parts)
        self._nodes.claimed += self._parts

    @property
    def placed(self) -> int:
        return sum(self._parts) if sum(self._parts) <= self._nodes.cpus(self._nodes.now) else 0

    def release(self) -> None:
        self._parts = []

    def __enter__(self) -> FakeClaims:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def choose(monkeypatch):
    def choose_on(nodes: Nodes, workers, before: int | None = None, check: Callable[[], None] = lambda: None) -> int:
        monkeypatch.setattr(capacity, "free_by_node", nodes.free_by_node)
        monkeypatch.setattr(capacity, "Claims", nodes.claims)
        monkeypatch.setattr(capacity, "time", nodes)
        config = load({"scaling": {"num_workers": workers, "shrink_after_s": 20.0}, "train_batch_size": 8})
        return Room(config, WORKER, allowed_sizes(config), check).choose(before)

    return choose_on


def test_a_number_is_never_waited_for_here(choose) -> None:
    nodes = Nodes(lambda now: 0)
    assert choose(nodes, 4) == 4 and (nodes.now, nodes.claimed) == (0, [])


def test_a_run_starts_with_as_many_as_have_room(choose) -> None:
    assert [choose(Nodes(lambda now, cpus=cpus: cpus), [1, 4]) for cpus in (1, 3, 4, 9)] == [1, 3, 4, 4]


def test_room_that_is_just_given_back_is_waited_for_a_moment(choose) -> None:
    nodes = Nodes(lambda now: 4 if now >= 2 else 1)
    assert choose(nodes, [1, 4]) == 4 and nodes.now < 5


def test_the_fewest_are_waited_for_as_a_whole(choose) -> None:
    nodes = Nodes(lambda now: int(now // 100))
    assert choose(nodes, [3, 8]) == 3
    assert 300 <= nodes.now < 302 and nodes.claimed == [8, 3], "one claim for all of them, which an autoscaler sees"


def test_more_that_came_with_the_fewest_are_taken_at_once(choose) -> None:
    assert choose(Nodes(lambda now: 5 if now > 50 else 0), [3, 8]) == 5


def test_after_a_loss_the_old_number_has_a_while_to_come_back(choose) -> None:
    back = Nodes(lambda now: 4 if now >= 15 else 3)
    assert choose(back, [1, 4], before=4) == 4 and 15 <= back.now < 17
    gone = Nodes(lambda now: 3)
    assert choose(gone, [1, 4], before=4) == 3 and 20 <= gone.now < 22


def test_after_a_loss_the_run_takes_what_there_is_beyond_the_old_number(choose) -> None:
    assert choose(Nodes(lambda now: 4), [1, 4], before=2) == 4


def test_too_few_after_a_loss_are_waited_for(choose) -> None:
    nodes = Nodes(lambda now: 2 if now >= 500 else 1)
    assert choose(nodes, [2, 4], before=4) == 2 and nodes.now >= 500


def test_waiting_ends_when_the_driver_is_told_to(choose) -> None:
    nodes = Nodes(lambda now: 0)

    def check() -> None:
        if nodes.now > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        choose(nodes, [1, 4], check=check)
    assert nodes.now < 42
