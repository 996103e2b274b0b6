"""What the clock counts: elements on the wire exactly, times as bounds that must hold on any machine."""

from __future__ import annotations

import time

import torch

from raydz.dist import CommClock, Communicator, Handle


class SlowWork:
    """A collective that takes a while to wait for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> None:
        time.sleep(self._seconds)


def clock() -> CommClock:
    return CommClock(torch.device("cpu"))


def test_waiting_is_counted_once_and_taken_once() -> None:
    ours = clock()
    handle = Handle([SlowWork(0.02)], ours)
    handle.wait()
    handle.wait()
    waited, total = ours.take()
    assert 0.02 <= waited <= total
    assert ours.take() == (0.0, 0.0)


def test_time_behind_computation_is_communication_but_not_waiting() -> None:
    ours = clock()
    handle = Handle([SlowWork(0.0)], ours)
    started = time.perf_counter()
    time.sleep(0.03)  # computation
    handle.wait()
    elapsed = time.perf_counter() - started
    waited, total = ours.take()
    assert 0.03 <= total <= elapsed + 0.01
    assert waited <= elapsed - 0.03


def test_overlapping_collectives_count_their_time_once() -> None:
    ours = clock()
    started = time.perf_counter()
    handles = [Handle([SlowWork(0.0)], ours) for _ in range(3)]
    time.sleep(0.02)
    for handle in handles:
        handle.wait()
    elapsed = time.perf_counter() - started
    assert 0.02 <= ours.take()[1] <= elapsed


def test_a_handle_without_work_finishes_once_and_costs_no_time() -> None:
    ours, calls = clock(), []
    handle = Handle([], ours, lambda: calls.append(1))
    handle.wait()
    handle.wait()
    assert calls == [1] and ours.take() == (0.0, 0.0)


def count(rank: int, world_size: int) -> tuple[int, bool]:
    import torch.distributed as dist

    ours = clock()
    comm = Communicator(dist.group.WORLD if dist.is_initialized() else None, ordered=True, clock=ours)
    full = torch.zeros(12 * world_size)
    comm.all_gather_flat(full, tag=1).wait()
    comm.reduce_scatter_flat(full, torch.zeros(12)).wait()
    waited, total = ours.take()
    return ours.elements_sent, 0 <= waited <= total


def test_each_collective_counts_all_but_the_own_shard(ranks) -> None:
    for world in (1, 2, 3):
        assert ranks(world).run(count) == [(2 * 12 * (world - 1), True)] * world
