"""Weights on a disk: what is read is what was stored, through few buffers, in any order; failures are named."""

from __future__ import annotations

import errno
import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raydz.config import load_engine
from raydz.errors import ConfigError, OffloadError
from raydz.offload.aio import AioOptions
from raydz.offload.folder import SwapFolder
from raydz.offload.memory import HostMemory
from raydz.offload.shards import DiskShards
from tests.zero.models import Plain
from tests.zero.test_accounting import BLOCKS, memory_run, sizes
from tests.zero.training import Run, assert_equal_bits, numpy_weights, start, train_step, train_with_engine


def make(tmp_path: Path, *, slots: int = 2, numel: int = 5000, threads: bool = False) -> DiskShards:
    aio = AioOptions(block_size=4096, use_io_uring=not threads)
    return DiskShards(
        HostMemory(1 << 24), SwapFolder(str(tmp_path)), num_slots=slots, slot_numel=numel, aio=aio
    )  # fmt: skip


def fetched(shards: DiskShards, shard: Tensor) -> Tensor:
    into = torch.empty_like(shard)
    shards.fetch(shard, into)
    return into


@pytest.mark.parametrize("threads", [False, True], ids=["io_uring", "threads"])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_any_order_of_stores_fetches_and_direct_writes_reads_what_was_written_last(
    tmp_path: Path, slots: int, threads: bool
) -> None:
    dice = random.Random(slots)
    shards = make(tmp_path, slots=slots, threads=threads)
    sizes_of = [1, 2, 1023, 1024, 1025, 4097, 5000]
    views = [shards.shard(n, dice.choice([torch.float32, torch.bfloat16]), f"w{n}") for n in sizes_of]
    wanted = [torch.zeros_like(view) for view in views]
    for _ in range(300):
        index = dice.randrange(len(views))
        values = torch.randn(sizes_of[index]).to(views[index].dtype)
        action = dice.choice(["store", "write", "fetch", "fetch", "ahead", "read"])
        if action == "store":
            shards.store(views[index], values)
            wanted[index] = values
        elif action == "write":
            shards.land(views[index])
            views[index].copy_(values)
            shards.forget(views[index])
            wanted[index] = values
        elif action == "ahead":
            shards.read_ahead(views[index])
        elif action == "read":
            shards.land(views[index])
            assert torch.equal(views[index], wanted[index])
        else:
            assert torch.equal(fetched(shards, views[index]), wanted[index])
    shards.finish()
    for view, values in zip(views, wanted, strict=True):
        assert torch.equal(view, values)
    shards.close()
    shards.close()


def test_what_is_read_ahead_is_not_read_again_and_what_was_stored_is_not_read_at_all(tmp_path: Path) -> None:
    shards = make(tmp_path, slots=2)
    first, second = (shards.shard(1024, torch.float32, "w") for _ in range(2))
    assert shards.read_ahead(first) and shards.read_ahead(first) and shards.bytes_read == 4096
    fetched(shards, first)
    assert shards.bytes_read == 4096
    shards.store(second, torch.ones(1024))
    assert fetched(shards, second).tolist() == [1.0] * 1024
    assert shards.bytes_read == 4096 and shards.bytes_written == 4096
    shards.finish()
    assert shards.read_ahead(first) and shards.read_ahead(second)
    third = shards.shard(1024, torch.float32, "w")
    assert not shards.read_ahead(third)  # no buffer is idle
    assert fetched(shards, third).tolist() == [0.0] * 1024  # but one is made so
    shards.close()


def test_a_shard_larger_than_a_buffer_is_refused_with_the_key(tmp_path: Path) -> None:
    shards = make(tmp_path, numel=100)
    with pytest.raises(OffloadError, match=r"(?s)layers\.0.*offload_param\.buffer_size.*100.*101"):
        shards.shard(101, torch.float32, "layers.0")
    assert shards.shard(0, torch.float32, "nothing").numel() == 0 and shards.num_bytes == 0
    shards.close()


def test_a_full_disk_is_said_when_the_shard_is_made(tmp_path: Path, monkeypatch) -> None:
    shards = make(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"(?s)ENOSPC|No space left"):
        shards.shard(10, torch.float32, "layers.0")
    shards.close()


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_disk_that_fails_is_an_error_with_path_and_errno_and_stays_one(tmp_path: Path, what: str) -> None:
    shards = make(tmp_path, slots=2)
    shard = shards.shard(1024, torch.float32, "w")
    fetched(shards, shard)
    # a closed descriptor's number is a file that cannot be read or written this way
    flags = os.O_WRONLY if what == "read" else os.O_RDONLY
    other = os.open(tmp_path / "other", flags | os.O_CREAT, 0o600)
    shards._queue.close()
    os.dup2(other, shards._file.fd)
    shards._queue = type(shards._queue)(AioOptions(), [shards._file])
    for _ in range(2):
        with pytest.raises(OffloadError, match=what) as caught:
            if what == "read":
                fetched(shards, shard)
            else:
                shards.store(shard, torch.ones(1024))
                shards.finish()
        assert "parameters" in str(caught.value) and "Bad file descriptor" in str(caught.value)
    os.close(other)


def test_what_is_dropped_makes_room_and_buffers_grow_with_what_comes(tmp_path: Path) -> None:
    shards = make(tmp_path, slots=1)
    first = shards.shard(1000, torch.float32, "w")
    shards.store(first, torch.ones(1000))
    assert fetched(shards, first).tolist() == [1.0] * 1000
    shards.drop(first)
    again = shards.shard(900, torch.float32, "w")
    assert shards.num_bytes == 4096 and fetched(shards, again).tolist() == [0.0] * 900
    large = shards.shard(5000, torch.float32, "w")
    shards.store(large, torch.ones(5000))
    assert fetched(shards, large).tolist() == [1.0] * 5000
    assert shards._memory.bytes_held == 5 * 4096
    shards.close()


def freeze_in_a_loop(rank: int, world_size: int, run: Run) -> list[int]:
    engine, counts = start(run), []
    train_step(engine, run, rank, world_size, 1)
    for step in range(4):
        engine.set_trainable("layers.0", step % 2 == 1)
        train_step(engine, run, rank, world_size, 2 + step)
        counts.append(engine.sharded.offload.disk.num_bytes)
    engine.destroy()
    return counts


@pytest.mark.parametrize("optimizer", ["none", pytest.param("nvme", marks=pytest.mark.slow)])
def test_freezing_again_and_again_takes_no_more_of_the_disk(ranks, tmp_path: Path, optimizer: str) -> None:
    (counts,) = ranks(1).run(freeze_in_a_loop, on_disk(memory_run(3), tmp_path, optimizer))
    assert len(set(counts[1:])) == 1


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    shards = make(tmp_path)
    shards.shard(1000, torch.float32, "w")
    assert list(tmp_path.glob("raydz/*/rank*"))
    shards.close()
    assert not list(tmp_path.glob("raydz/*/rank*")) and shards._memory.bytes_held == 0


# -- in the engine -------------------------------------------------------------------------------------------------


def on_disk(run: Run, path: Path, optimizer: str = "none", **section) -> Run:
    param = {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0, **section}
    zero = {"offload_param": param, "offload_optimizer": {"device": optimizer, "nvme_path": str(path)}}
    return run.with_(zero=(*run.zero, *zero.items()))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["none", pytest.param("cpu", marks=pytest.mark.slow), "nvme"])
def test_every_bit_is_as_in_memory(ranks, tmp_path: Path, world: int, optimizer: str) -> None:
    run = Run(partial(Plain, 3), stage=3, bf16=True, accumulation=2 if world == 1 else 3)
    wanted = ranks(world).run(train_with_engine, run)[0]
    found = ranks(world).run(train_with_engine, on_disk(run, tmp_path, optimizer))[0]
    assert (found.losses, found.norms) == (wanted.losses, wanted.norms)
    assert_equal_bits(found.weights, wanted.weights)
    assert not list(tmp_path.glob("raydz/*/rank*"))


def traffic(rank: int, world_size: int, run: Run) -> dict[str, int]:
    engine = start(run)
    for step in (1, 2):
        train_step(engine, run, rank, world_size, step)
    engine.optimizer.finish()
    disk, before = engine.sharded.offload.disk, engine.sharded.offload.bytes_fetched
    read = disk.bytes_read
    train_step(engine, run, rank, world_size, 3)
    engine.optimizer.finish()
    found = {
        "disk": disk.num_bytes, "read": disk.bytes_read - read, "slots": len(disk._slots),
        "fetched": engine.sharded.offload.bytes_fetched - before,
    }  # fmt: skip
    engine.destroy()
    return found


def test_max_in_cpu_and_buffer_count_say_what_is_in_host_memory(ranks, tmp_path: Path) -> None:
    embed, block, _, root = sizes(1)
    groups = BLOCKS + 3
    (all_of_it,) = ranks(1).run(traffic, on_disk(memory_run(3), tmp_path))
    assert all_of_it["disk"] == 4096 * groups and all_of_it["slots"] == 5
    assert all_of_it["read"] == 4096 * (groups + BLOCKS)  # the blocks twice
    some = on_disk(memory_run(3), tmp_path, max_in_cpu=root + embed + 2 * block, buffer_count=1)
    (found,) = ranks(1).run(traffic, some)
    assert found["disk"] == 4096 * (BLOCKS - 2 + 1) and found["slots"] == 1
    assert found["fetched"] == all_of_it["fetched"]


def test_checkpoints_and_whole_parameters_come_from_the_disk(ranks, tmp_path: Path) -> None:
    plain = Run(partial(Plain, 2), stage=3, bf16=True)
    (wanted,) = ranks(1).run(save_load_and_go_on, plain, str(tmp_path / "a"))
    (found,) = ranks(1).run(save_load_and_go_on, on_disk(plain, tmp_path), str(tmp_path / "b"))
    (both,) = ranks(1).run(save_load_and_go_on, on_disk(plain, tmp_path, "nvme"), str(tmp_path / "c"))
    for weights in (found, both):
        assert_equal_bits(weights, wanted)


def save_load_and_go_on(rank: int, world_size: int, run: Run, folder: str):
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    engine.save_checkpoint(folder, "c")
    train_step(engine, run, rank, world_size, 2)
    engine.load_checkpoint(folder, "c")
    with engine.gathered(modify=True), torch.no_grad():
        engine.module.head.weight.mul_(2)
    train_step(engine, run, rank, world_size, 3)
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


def test_a_path_is_needed_and_only_stage_3_has_shards() -> None:
    with pytest.raises(ConfigError, match=r"(?s)offload_param\.nvme_path"):
        load_engine({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
