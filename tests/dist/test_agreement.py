"""Errors of one rank become errors of all, with their class and fields."""

from __future__ import annotations

import pytest

from raydz.dist.agreement import on_every_rank, on_rank_zero
from raydz.errors import CheckpointError, RaydzError
from raydz.storage import NotFound


def communicator(world_size):
    import torch
    import torch.distributed as dist

    from raydz.dist import CommClock, Communicator

    group = dist.group.WORLD if world_size > 1 else None
    return Communicator(group, ordered=True, clock=CommClock(torch.device("cpu")))


def outcome(work) -> tuple:
    try:
        return ("value", work())
    except RaydzError as error:
        return (type(error).__name__, error.what, error.where, error.got, error.wanted, error.remedy)


def every_rank(rank, world_size, bad):
    def work():
        if rank in bad:
            raise CheckpointError(f"bad {rank}", where="here", got=3, remedy="mend it")
        return rank * 10

    return outcome(lambda: on_every_rank(communicator(world_size), work))


def rank_zero(rank, world_size, fails):
    def work():
        assert rank == 0, "only rank 0 works"
        if fails:
            raise NotFound("no such file", where="there")  # a class that raydz.errors does not have
        return {"step": 7, "name": None}

    return outcome(lambda: on_rank_zero(communicator(world_size), work))


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_gets_its_own_value(ranks, world_size):
    assert ranks(world_size).run(every_rank, ()) == [("value", rank * 10) for rank in range(world_size)]


def test_first_error_is_raised_on_every_rank_and_names_its_rank(ranks):
    told = ranks(3).run(every_rank, (1, 2))
    assert told == [("CheckpointError", "bad 1 (rank 1)", "here", "3", None, "mend it")] * 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_rank_zeros_value_reaches_all(ranks, world_size):
    assert ranks(world_size).run(rank_zero, False) == [("value", {"step": 7, "name": None})] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_rank_zeros_error_is_raised_on_all_as_the_nearest_public_class(ranks, world_size):
    assert (
        ranks(world_size).run(rank_zero, True)
        == [("StorageError", "no such file", "there", None, None, None)] * world_size
    )
