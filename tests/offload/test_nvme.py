"""The NVMe tier: the bits of plain memory, what it reads and writes, and what a failing disk leaves."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydz.errors import OffloadError
from raydz.offload.aio import AioOptions
from raydz.offload.folder import SwapFolder
from raydz.offload.memory import HostMemory
from raydz.offload.nvme import MIN_SLOTS, NvmeOptions, NvmeTier
from raydz.offload.residents import choose_residents
from raydz.offload.tiers import HostTier, Tier, UnitShape
from raydz.ops import adamw_step, native
from raydz.ops.adamw import Buffers, adamw_reference, step_scalars
from tests.support.disks import full_disk, loop_disk, needs_mounts

__all__ = ["needs_mounts"]
pytestmark = pytest.mark.native
PAGE, MIB = 4096, 1 << 20
STATES = {"home": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
SPLIT = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "home": torch.bfloat16, "low": torch.int16}
NUMELS = [0, 1, 1001, 65_536, 77, 300_001, 12_345, 4096, 200_000]
SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def kernels():
    if native.load() is None:
        pytest.skip("raydz was installed without its compiled kernels")


def shapes(numels=NUMELS, tensors=STATES) -> list[UnitShape]:
    return [UnitShape(index, 0, numel, tensors, f"unit {index}") for index, numel in enumerate(numels)]


def make(root, units, budget=1 << 30, **options) -> NvmeTier:
    memory = HostMemory(budget, pinned=False)
    return NvmeTier(units, memory, SwapFolder(str(root)), NvmeOptions(**{"cache_bytes": 0, **options}))


def master(index: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(index))


def gradient(index: int, numel: int, step: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + index))


def train(tier: Tier, numels, orders) -> list[dict[str, torch.Tensor]]:
    """AdamW through a tier as the engine does it; returns what it holds in the end."""
    for index, numel in enumerate(numels):
        tier.fetch(index)["home"].copy_(master(index, numel))
        tier.write_back(index)
    for step, order in enumerate(orders, start=1):
        tier.begin(order)
        for index in order:
            held = tier.fetch(index)
            grad = gradient(index, numels[index], step)
            adamw_step(held["home"], grad, held["exp_avg"], held["exp_avg_sq"], step=step, **SETTINGS)
            tier.write_back(index)
    tier.finish()
    return [contents(tier, index) for index in range(len(numels))]


def contents(tier: Tier, index: int) -> dict[str, torch.Tensor]:
    copies = {name: tensor.clone() for name, tensor in tier.fetch(index).items()}
    tier.release(index)
    return copies


def oracle(numels, num_steps: int) -> list[dict[str, torch.Tensor]]:
    """The same in plain tensors with the torch reference."""
    found = []
    for index, numel in enumerate(numels):
        p, m, v = master(index, numel), torch.zeros(numel), torch.zeros(numel)
        for step in range(1, num_steps + 1):
            buffers = Buffers(p, None, gradient(index, numel, step), m, v, None)
            adamw_reference(buffers, step_scalars(step=step, **SETTINGS), True)
        found.append({"home": p, "exp_avg": m, "exp_avg_sq": v})
    return found


def equal(found, wanted) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(found, wanted, strict=True) for name in wanted[0])


UP = list(range(len(NUMELS)))
DOWN = UP[::-1]


OPTIONS = {
    "plain": {},
    "five slots": {"slots": 5},
    "nothing ahead": {"reads_ahead": False},
    "nothing behind": {"writes_behind": False},
    "in turn": {"reads_ahead": False, "writes_behind": False},
    "some stay": {"cache_bytes": 2 * MIB},
    "threads": {"aio": AioOptions(use_io_uring=False)},
    "small blocks": {"aio": AioOptions(block_size=PAGE, queue_depth=3, thread_count=2)},
}
ORDERS = {"alternating": [UP, DOWN] * 2, "any": [DOWN, [3, 1, 0, 2, 8, 7, 5, 6, 4], UP, UP]}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_a_disk_holds_the_bits_that_memory_holds(tmp_path, options, orders):
    tier = make(tmp_path, shapes(), **options)
    assert equal(train(tier, NUMELS, orders), oracle(NUMELS, 4))
    tier.close()


def test_the_host_tier_holds_them_too():
    tier = HostTier(shapes(), HostMemory(1 << 30, pinned=False))
    assert equal(train(tier, NUMELS, [UP] * 4), oracle(NUMELS, 4))
    tier.close()


def test_units_may_be_fetched_without_being_announced_and_several_at_a_time(tmp_path):
    tier = make(tmp_path, shapes(), slots=3)
    train(tier, NUMELS, [UP])
    tier.begin(UP)
    wanted = oracle(NUMELS, 1)
    for index in (8, 3, 5, 0, 1, 8):
        assert equal([contents(tier, index)], [wanted[index]])
    held = {index: tier.fetch(index) for index in (2, 7, 4)}
    assert all(equal([tensors], [wanted[index]]) for index, tensors in held.items())
    for index in held:
        tier.release(index)
    assert equal([contents(tier, index) for index in UP], wanted)
    tier.close()


def test_tensors_begin_on_pages_and_states_begin_at_zero(tmp_path):
    tier = make(tmp_path, shapes(tensors=SPLIT))
    for index, numel in enumerate(NUMELS):
        held = tier.fetch(index)
        assert {name: tensor.dtype for name, tensor in held.items()} == SPLIT
        assert all(tensor.numel() == numel and not tensor.any() for tensor in held.values())
        assert all(tensor.data_ptr() % PAGE == 0 for tensor in held.values() if numel)
        tier.release(index)
    tier.close()


def test_states_are_not_written_before_they_are_something(tmp_path):
    numels = [4 * PAGE] * 6
    tier = make(tmp_path, shapes(numels))
    one = 4 * PAGE * 4
    for index in range(6):
        tier.fetch(index)["home"].fill_(1.0)
        tier.write_back(index)
    tier.finish()
    assert (tier.bytes_written, tier.bytes_read) == (6 * one, 0)
    for index in (3, 0):
        held = tier.fetch(index)
        assert not held["exp_avg"].any() and not held["exp_avg_sq"].any()
        held["exp_avg_sq"].fill_(-0.0)
        tier.write_back(index)
    tier.finish()
    assert tier.bytes_written == 6 * one + 2 * 3 * one
    assert bool(contents(tier, 0)["exp_avg_sq"].signbit().all())
    tier.close()


def step(tier: NvmeTier, order) -> None:
    tier.begin(order)
    for index in order:
        for tensor in tier.fetch(index).values():
            tensor.add_(1)
        tier.write_back(index)
    tier.finish()


def test_units_that_stay_are_neither_read_nor_written(tmp_path):
    unit = 3 * PAGE * 4
    moved = {}
    for cached in (0, 2, 5, 8):
        tier = make(tmp_path, shapes([PAGE] * 8), cache_bytes=cached * unit)
        step(tier, range(8))
        before = tier.bytes_read, tier.bytes_written
        for _ in range(3):
            step(tier, range(8))
        moved[cached] = tier.bytes_written - before[1]
        assert len(tier.residents) == cached
        assert tier.bytes_held["disk"] == (8 - cached) * unit
        slots = min(4, 8 - cached)
        assert tier.bytes_held["host"] == (cached + slots) * unit
        assert all(bool((contents(tier, index)["home"] == 4).all()) for index in range(8))
        tier.close()
    assert moved == {cached: 3 * (8 - cached) * unit for cached in moved}


def test_what_slots_still_hold_is_not_read_again(tmp_path):
    unit = 3 * PAGE * 4
    tier = make(tmp_path, shapes([PAGE] * 8), slots=4)
    step(tier, range(8))
    before = tier.bytes_read
    step(tier, range(7, -1, -1))
    assert tier.bytes_read - before == (8 - 4) * unit
    tier.close()


def test_without_a_limit_the_cache_takes_what_the_budget_has(tmp_path):
    unit = 3 * PAGE * 4
    tier = make(tmp_path, shapes([PAGE] * 20), budget=10 * unit, slots=4, cache_bytes=None)
    assert len(tier.residents) == 6
    assert tier.bytes_held == {"host": 10 * unit, "disk": 14 * unit}
    tier.close()


def test_slots_are_as_many_as_asked_and_no_fewer_than_the_overlap_needs(tmp_path):
    unit = 3 * PAGE * 4
    for asked, there in ((1, MIN_SLOTS), (4, 4), (6, 6), (100, 20)):
        tier = make(tmp_path, shapes([PAGE] * 20), slots=asked)
        assert tier.bytes_held["host"] == there * unit
        tier.close()


def test_reading_ahead_begins_before_a_unit_is_asked_for(tmp_path):
    for reads_ahead in (True, False):
        tier = make(tmp_path, shapes([PAGE] * 12), reads_ahead=reads_ahead)
        step(tier, range(12))
        before = tier.bytes_read
        tier.begin(range(12))
        assert (tier.bytes_read > before) is reads_ahead
        tier.close()


def test_writing_behind_goes_on_while_the_disk_writes(tmp_path, needs_mounts):
    with loop_disk(tmp_path / "disk", 64 * MIB, 48 * MIB) as disk:
        for behind in (True, False):
            tier = make(disk.path, shapes([PAGE] * 12), writes_behind=behind, aio=AioOptions(timeout_s=0.5))
            tier.fetch(0)["home"].fill_(1)
            with disk.frozen():
                if behind:
                    tier.write_back(0)
                else:
                    with pytest.raises(OffloadError, match="ETIMEDOUT"):
                        tier.write_back(0)
            tier.close()


def test_everything_is_given_back(tmp_path):
    memory = HostMemory(1 << 30, pinned=False)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        tier = NvmeTier(shapes(), memory, SwapFolder(str(tmp_path)), NvmeOptions(cache_bytes=MIB))
        train(tier, NUMELS, [UP])
        tier.close()
        tier.close()
    assert memory.bytes_held == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.listdir(tmp_path / "raydz") == [".lock"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, needs_mounts):
    with full_disk(tmp_path / "disk", 8 * MIB) as folder:
        memory = HostMemory(1 << 30, pinned=False)
        with pytest.raises(OffloadError) as caught:
            NvmeTier(shapes([MIB]), memory, SwapFolder(str(folder)), NvmeOptions(cache_bytes=0))
        assert caught.value.wanted == "12.0 MiB for this rank"
        assert str(folder) in str(caught.value.where)
        assert "8.0 MiB free" in str(caught.value.got)
        assert memory.bytes_held == 0
        assert os.listdir(folder / "raydz") == [".lock"]


def test_a_budget_without_room_for_the_slots_is_refused(tmp_path):
    with pytest.raises(OffloadError, match=r"slot(.|\n)*host_memory_budget"):
        make(tmp_path, shapes([MIB] * 8), budget=20 * MIB, cache_bytes=None)
    assert os.listdir(tmp_path / "raydz") == [".lock"]


def broken_step(tier: NvmeTier, num_units: int) -> OffloadError:
    """Steps until one fails."""
    with pytest.raises(OffloadError) as caught:
        for _ in range(20):
            step(tier, range(num_units))
    return caught.value


@pytest.mark.parametrize("use_io_uring", [True, False], ids=["io_uring", "threads"])
@pytest.mark.parametrize("fault", ["full", "broken"])
def test_after_a_failure_nothing_is_used(tmp_path, needs_mounts, fault, use_io_uring):
    aio = AioOptions(use_io_uring=use_io_uring, timeout_s=30)
    room = 12 * MIB if fault == "full" else 64 * MIB
    with loop_disk(tmp_path / "disk", 64 * MIB, room) as disk:
        tier = make(disk.path, shapes([MIB // 4] * 8), aio=aio)
        if fault == "broken":
            step(tier, range(8))
            disk.break_down()
        begun = time.monotonic()
        error = broken_step(tier, 8)
        number = errno.ENOSPC if fault == "full" else errno.EIO
        assert f"errno {number} " in str(error) and str(disk.path) in str(error)
        for call in (partial(tier.begin, [0]), partial(tier.fetch, 0), tier.finish):
            with pytest.raises(OffloadError, match=f"errno {number} "):
                call()
        tier.close()
        assert time.monotonic() - begun < 20


sizes = st.lists(st.integers(0, 40), max_size=30)


@settings(deadline=None)
@given(sizes, st.integers(0, 600), st.integers(3, 6), st.integers(0, 900))
def test_residents_keep_within_every_limit_and_leave_no_room_for_another(sizes, cache, num_slots, room):
    stay = choose_residents(sizes, cache, num_slots, room)
    held = sum(sizes[index] for index in stay)
    assert held <= cache
    others = [size for index, size in enumerate(sizes) if index not in stay]
    if held:
        assert held + (num_slots * max(sizes) if others else 0) <= room
    left = min(cache, room - num_slots * max(sizes, default=0)) - held
    assert all(size > left for size in others)


def test_residents_are_spread_over_the_step():
    stay = sorted(choose_residents([10] * 40, 100, 4, 1000))
    assert len(stay) == 10
    assert all(3 <= b - a <= 5 for a, b in itertools.pairwise(stay))


def test_between_steps_a_unit_can_be_read_and_changed_where_it_lies(tmp_path):
    tier = make(tmp_path, shapes(), cache_bytes=MIB)
    wanted = train(tier, NUMELS, [UP, DOWN])
    views = [tier.view(index) for index in UP]
    assert equal(views, wanted)
    for index, tensors in enumerate(views):
        tensors["exp_avg"].copy_(master(50 + index, NUMELS[index]))
        wanted[index]["exp_avg"].copy_(tensors["exp_avg"])
    tier.begin(UP)
    for index in UP:
        tier.fetch(index)["home"].add_(1)
        wanted[index]["home"].add_(1)
        tier.write_back(index)
    tier.finish()
    assert equal([contents(tier, index) for index in UP], wanted)
    assert equal([tier.view(index) for index in UP], wanted)
    tier.close()


def test_states_that_were_only_viewed_can_be_changed_too(tmp_path):
    tier = make(tmp_path, shapes([1001] * 6))
    for index in range(6):
        assert not tier.view(index)["exp_avg_sq"].any()
        tier.fetch(index)["home"].fill_(index)
        tier.write_back(index)
    tier.finish()
    for index in range(6):
        tier.view(index)["exp_avg_sq"].fill_(7)
    tier.begin(range(6))
    for index in range(6):
        held = tier.fetch(index)
        assert bool((held["home"] == index).all() and (held["exp_avg_sq"] == 7).all()) and not held["exp_avg"].any()
        tier.release(index)
    tier.close()


def test_waits_are_counted_by_what_was_waited_for(tmp_path, needs_mounts):
    with loop_disk(tmp_path / "disk", 64 * MIB, 48 * MIB) as disk:
        tier = make(disk.path, shapes([PAGE] * 8), aio=AioOptions(timeout_s=30))
        step(tier, range(8))
        tier.take_waits()
        tier.fetch(0)["home"].fill_(1)
        with disk.frozen():
            tier.write_back(0)
            thawing = threading.Timer(0.5, disk.thaw)
            thawing.start()
            tier.finish()
            thawing.join()
        waits = tier.take_waits()
        assert waits["disk_write"] > 0.4 > waits["disk_read"]
        assert tier.take_waits() == {"disk_read": 0.0, "disk_write": 0.0}
        tier.close()
