"""Collectives on gloo ranks. The oracle sums with numpy in rank order; for a few numbers it is written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from raydz.dist import CommClock, Communicator
from raydz.errors import LayoutError

NUMEL = 120  # divides over 1 to 4 ranks


def communicator() -> Communicator:
    import torch.distributed as dist

    group = dist.group.WORLD if dist.is_initialized() else None
    return Communicator(group, ordered=False, clock=CommClock(torch.device("cpu")))


def values_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, so that sums in another order have other bits."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-12, 12, (NUMEL,), generator=generator)
    return (torch.randn(NUMEL, generator=generator) * 2.0**exponents).to(dtype)


def reduce_in_buckets(rank: int, world_size: int, buckets: int, dtype: torch.dtype) -> np.ndarray:
    """This rank's share of the sum, where `buckets` flat tensors are reduced one by one, all launched first."""
    comm = communicator()
    pieces = values_of(rank, dtype).chunk(buckets)
    outs = [torch.full((piece.numel() // world_size,), math.nan) for piece in pieces]
    handles = [comm.reduce_scatter_flat(p.clone(), out) for p, out in zip(pieces, outs, strict=True)]
    for handle in handles:
        handle.wait()
    return torch.stack(outs).numpy()


def ordered_sum(world_size: int, dtype: torch.dtype) -> np.ndarray:
    total = values_of(0, dtype).float().numpy()
    for rank in range(1, world_size):
        total = (total + values_of(rank, dtype).float().numpy()).astype(np.float32)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("buckets", [1, 2, 5, 10])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_sum_is_in_rank_order_in_fp32_whatever_the_buckets(ranks, world: int, buckets: int, dtype) -> None:
    if NUMEL // buckets % world:
        buckets = 10 if NUMEL // 10 % world == 0 else 1
    shares = ranks(world).run(reduce_in_buckets, buckets, dtype)
    found = np.stack(shares, axis=1).reshape(-1)  # bucket, rank, element
    assert found.tobytes() == ordered_sum(world, dtype).tobytes()


def test_the_numbers_can_tell_orders_apart() -> None:
    backwards = values_of(2).numpy() + values_of(1).numpy() + values_of(0).numpy()
    assert not np.array_equal(backwards, ordered_sum(3, torch.float32))


def all_reduce_a_shard(rank: int, world_size: int, in_order: bool) -> tuple[np.ndarray, int, bool]:
    """This rank's share of a sum that everybody receives, what it sent, and whether 1 was in the result before."""
    comm = communicator()
    comm._ordered = in_order  # not in order is what NCCL does; gloo can, too
    shard = NUMEL // world_size
    out, added = torch.full((shard,), math.nan), torch.ones(shard)
    comm.all_reduce_to_shard(values_of(rank), out).wait()
    sent = comm.clock.elements_sent
    comm.all_reduce_to_shard(values_of(rank), added, accumulate=True).wait()
    return out.numpy(), sent, torch.equal(added, 1 + out)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_all_reduce_leaves_each_rank_its_shard_and_sends_twice(ranks, world: int, in_order: bool) -> None:
    found = ranks(world).run(all_reduce_a_shard, in_order)
    whole, wanted = np.concatenate([share for share, _, _ in found]), ordered_sum(world, torch.float32)
    if in_order:
        assert whole.tobytes() == wanted.tobytes()
    else:
        magnitude = sum(values_of(rank).abs().numpy() for rank in range(world))
        assert (np.abs(whole - wanted) <= world * np.finfo(np.float32).eps * magnitude).all()
    assert all(sent == 2 * NUMEL * (world - 1) // world and adds for _, sent, adds in found)


def accumulate(rank: int, world_size: int) -> list[float]:
    comm = communicator()
    out = torch.tensor([100.0, 200.0])
    flat = torch.arange(2.0 * world_size) + rank
    comm.reduce_scatter_flat(flat, out, accumulate=True).wait()
    comm.reduce_scatter_flat(flat, out, accumulate=True).wait()
    return out.tolist()


def test_accumulate_adds_to_what_is_there(ranks) -> None:
    # Rank r owns elements 2r and 2r + 1; summed over ranks 0, 1, 2 element i is 3i + 3; twice.
    assert ranks(3).run(accumulate) == [[106.0, 212.0], [118.0, 224.0], [130.0, 236.0]]


def gather_in_own_order(rank: int, world_size: int) -> list[list[float]]:
    """Each rank launches the gathers of four buffers in an order of its own, and waits in yet another."""
    comm = communicator()
    fulls = [torch.full((world_size * n,), math.nan) for n in (1, 5, 2, 3)]
    for index, full in enumerate(fulls):
        n = full.numel() // world_size
        full[rank * n : (rank + 1) * n] = 10.0 * index + rank
    order = [(rank + i) % 4 for i in range(4)]
    handles = {i: comm.all_gather_flat(fulls[i], tag=i + 1) for i in order}
    for i in reversed(order):
        handles[i].wait()
        handles[i].wait()  # a second time is free
    return [full.tolist() for full in fulls]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gathers_launched_in_any_order_get_their_own_bytes(ranks, world: int) -> None:
    wanted = [[10.0 * i + r for r in range(world) for _ in range(n)] for i, n in enumerate((1, 5, 2, 3))]
    assert ranks(world).run(gather_in_own_order) == [wanted] * world


def gather_nothing(rank: int, world_size: int) -> int:
    comm = communicator()
    empty, out = torch.zeros(0), torch.zeros(0)
    comm.all_gather_flat(empty, tag=1).wait()
    comm.reduce_scatter_flat(empty, out).wait()
    comm.broadcast(empty)
    return comm.clock.elements_sent


def test_tensors_without_elements_are_no_trouble(ranks) -> None:
    assert ranks(3).run(gather_nothing) == [0, 0, 0]


def small_exchanges(rank: int, world_size: int) -> tuple:
    comm = communicator()
    values = comm.all_gather_values([rank + 0.1, math.nan if rank else math.inf])
    texts = comm.all_gather_bytes(b"\x00\xff" * rank)
    shared = torch.arange(4).float() * (rank + 1)
    comm.broadcast(shared, source=world_size - 1)
    comm.barrier()
    return values, texts, shared.tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_bytes_and_broadcasts_reach_every_rank(ranks, world: int) -> None:
    for values, texts, shared in ranks(world).run(small_exchanges):
        assert [row[0] for row in values] == [rank + 0.1 for rank in range(world)]  # fp64 to the last bit
        assert math.isinf(values[0][1]) and all(math.isnan(row[1]) for row in values[1:])
        assert texts == [b"\x00\xff" * rank for rank in range(world)]
        assert shared == [0.0, world, 2.0 * world, 3.0 * world]


def exchange_uneven(rank: int, world_size: int, dtype: torch.dtype) -> tuple[list[list[float]], int]:
    """Rank r sends r * to elements of value 10 * r + to: nothing from rank 0, nothing to rank 0."""
    comm = communicator()
    pieces = [torch.full((rank * to,), 10.0 * rank + to, dtype=dtype) for to in range(world_size)]
    received = comm.exchange(pieces, [source * rank for source in range(world_size)])
    return [piece.tolist() for piece in received], comm.clock.elements_sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_exchange_brings_pieces_of_any_sizes(ranks, world: int, dtype: torch.dtype) -> None:
    for rank, (received, sent) in enumerate(ranks(world).run(exchange_uneven, dtype)):
        assert received == [[10.0 * source + rank] * (source * rank) for source in range(world)]
        assert sent == sum(rank * to for to in range(world) if to != rank)


def send_too_much(rank: int, world_size: int) -> str:
    comm = communicator()
    try:
        comm.all_gather_bytes(b"x" * (100 if rank == 1 else 1), limit=99)
    except LayoutError as error:
        comm.barrier()  # and the group is still good
        return str(error)
    return ""


def test_a_string_above_the_limit_is_refused_on_every_rank(ranks) -> None:
    for message in ranks(2).run(send_too_much):
        assert "100 bytes" in message and "<= 99" in message


def refusals(rank: int, world_size: int) -> list[str]:
    comm, messages = communicator(), []
    for flat, out in (
        (torch.zeros(7), torch.zeros(3)),
        (torch.zeros(6, 2).t()[0:1], torch.zeros(3)),
        (torch.zeros(6), torch.zeros(2)),
        (torch.zeros(6), torch.zeros(3, dtype=torch.bfloat16)),
    ):
        try:
            comm.reduce_scatter_flat(flat, out)
        except LayoutError as error:
            messages.append(str(error))
    return messages


def test_sizes_and_dtypes_that_do_not_fit_are_refused_before_anything_is_sent(ranks) -> None:
    for messages in ranks(2).run(refusals):
        assert len(messages) == 4
        assert "7 elements" in messages[0] and "multiple of 2" in messages[0]
        assert "contiguous=False" in messages[1]
        assert "3 x fp32" in messages[2] and "bfloat16" in messages[3]
