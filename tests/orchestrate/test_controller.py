"""The controller that waits for the next attempt, in real Ray processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import ray
from ray.exceptions import RayActorError

from raydz.orchestrate import controller as controller_module
from raydz.orchestrate.board import new_board
from raydz.orchestrate.controller import Standby

pytestmark = pytest.mark.ray


@pytest.fixture
def standby(ray_cluster, monkeypatch) -> Iterator[Standby]:
    monkeypatch.setattr(controller_module, "_LOOK_S", 0.1)
    monkeypatch.setattr(controller_module, "Controller", Process)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    standby = Standby()
    yield standby
    standby.close()
    ray.shutdown()


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


class Process:
    """Begins with anything."""

    def begin(self, **given: int) -> None:
        assert given == {"number": 7}


@pytest.mark.slow
def test_one_waits_from_the_first_step_on_and_begins_once(standby) -> None:
    board = new_board()
    with standby.beside(board):
        time.sleep(0.5)
        assert standby._waiting is None, "the group needs the cores to start"
        ray.get(board.post_step.remote(1))
        wait_for(lambda: standby._waiting is not None)
    waiting = standby._waiting
    assert standby.begin(number=7) is waiting
    assert standby.begin(number=7) is not waiting and standby._waiting is None


@pytest.mark.slow
def test_one_that_has_gone_is_replaced(standby) -> None:
    gone = standby._waiting = standby.begin(number=7)
    ray.kill(gone)
    with pytest.raises(RayActorError):
        while True:  # it dies when its node gets to it
            ray.get(gone.begin.remote(number=7))
    assert standby.begin(number=7) is not gone
