"""Snapshots in memory: the state of the moment, back to the bit, by every rank alone; or not used at all."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch

from raydz.checkpoint.memory import MemorySnapshots
from raydz.errors import CheckpointError, TrainingError
from raydz.storage.memory_slot import IMAGE_OFFSET, MemorySlot, new_memory
from tests.checkpoint.states import Setup, assert_same_bits, build, stored_tensors, train
from tests.checkpoint.test_async import slow_copies

CPU = torch.device("cpu")


@contextmanager
def two_slots():
    fds = [new_memory("test") for _ in range(2)]
    try:
        yield [MemorySlot(fd) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


def snapshot_and_restore(rank, world_size, root, setups):
    """A snapshot while training goes on, and another engine that takes it back; a save before and after each."""
    for name, setup in setups.items():
        engine = build(setup)
        train(engine, 1, 2)
        engine.module.seen.fill_(77)
        engine.save_checkpoint(f"{root}/{name}/then")
        with two_slots() as slots:
            with slow_copies():
                engine.snapshot(MemorySnapshots(slots, rank, world_size, CPU), step=2, state={"rows": [1, 2]})
                engine.module.seen.fill_(12345)  # what a forward may do to a buffer
                train(engine, 3, 4)
            engine._snapshots.wait()
            engine.destroy()
            fresh = build(setup)
            train(fresh, 1, 1)  # whatever a restore does not overwrite shows
            kept = MemorySnapshots(slots, rank, world_size, CPU)
            assert kept.usable(fresh.held_pieces()) == [(2, 0)]
            state = fresh.restore(kept, (2, 0))
            assert state["rows"] == [1, 2] and fresh.global_steps == 2
            fresh.save_checkpoint(f"{root}/{name}/again")
            train(fresh, 3, 3)  # and it trains on
            fresh.destroy()


SETUPS = {
    "plain": Setup(),
    "sharded": Setup(stage=1),
    "half": Setup(stage=2, bf16=True),
    "whole": Setup(stage=3, bf16=True, tied=True),
}


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_fresh_engine_has_the_state_of_the_moment_to_the_bit(ranks, tmp_path, world_size) -> None:
    ranks(world_size).run(snapshot_and_restore, str(tmp_path), SETUPS)
    for name in SETUPS:
        assert_same_bits(stored_tensors(tmp_path / name / "again"), stored_tensors(tmp_path / name / "then"))


@pytest.fixture
def engine():
    made = build(Setup(stage=1))
    train(made, 1, 1)
    yield made
    made.destroy()


def snapshots_of(engine, slots, steps) -> MemorySnapshots:
    found = MemorySnapshots(slots, 0, 1, CPU)
    for step in steps:
        engine.snapshot(found, step=step, state={})
        found.wait()
    return found


def test_the_newest_two_are_kept_and_each_commit_is_told(engine) -> None:
    told: list[int] = []
    with two_slots() as slots:
        found = MemorySnapshots(slots, 0, 1, CPU, committed=told.append)
        for step in (1, 2, 3):
            engine.snapshot(found, step=step, state={})
        found.wait()
        assert found.usable(engine.held_pieces()) == [(2, 0), (3, 0)] and told == [1, 2, 3]


def test_what_an_earlier_start_made_of_a_step_is_another_moment(engine) -> None:
    with two_slots() as slots:
        snapshots_of(engine, slots, (1,))
        later = MemorySnapshots(slots, 0, 1, CPU, start=1)
        engine.snapshot(later, step=1, state={})
        later.wait()
        assert later.usable(engine.held_pieces()) == [(1, 0), (1, 1)]
        later.forget_all_but((1, 1))
        assert later.usable(engine.held_pieces()) == [(1, 1)]
        later.forget_all_but(None)
        assert later.usable(engine.held_pieces()) == []


def test_a_damaged_image_is_not_used(engine) -> None:
    with two_slots() as slots:
        found = snapshots_of(engine, slots, (1, 2))
        [at] = [slot.fd for slot in slots if slot.record()["step"] == 2]
        value = os.pread(at, 1, IMAGE_OFFSET + 5000)[0]
        os.pwrite(at, bytes([value ^ 1]), IMAGE_OFFSET + 5000)
        assert found.usable(engine.held_pieces()) == [(1, 0)]


@pytest.mark.parametrize("other", [Setup(stage=1, shapes=((7, 6), (8,))), Setup(stage=1, bf16=True)])
def test_another_layout_is_not_used(engine, other) -> None:
    with two_slots() as slots:
        found, stranger = snapshots_of(engine, slots, (1,)), build(other)
        assert found.usable(stranger.held_pieces()) == []
        stranger.destroy()


@pytest.mark.parametrize(("rank", "world_size"), [(1, 2), (0, 2)])
def test_another_rank_or_number_of_ranks_is_not_used(engine, rank, world_size) -> None:
    with two_slots() as slots:
        snapshots_of(engine, slots, (1,))
        assert MemorySnapshots(slots, rank, world_size, CPU).usable(engine.held_pieces()) == []


def test_a_snapshot_that_was_broken_off_leaves_the_one_before(engine, monkeypatch) -> None:
    with two_slots() as slots:
        found = snapshots_of(engine, slots, (1,))
        monkeypatch.setattr("raydz.checkpoint.memory._sum", lambda *_: 1 // 0)
        engine.snapshot(found, step=2, state={})
        found.wait()
        monkeypatch.undo()
        assert found.faults == 1 and found.usable(engine.held_pieces()) == [(1, 0)]
        train(engine, 2, 2)  # nothing waits for what failed


def test_a_step_that_is_not_there_is_an_error(engine) -> None:
    with two_slots() as slots, pytest.raises(CheckpointError, match="no snapshot of this moment"):
        engine.restore(snapshots_of(engine, slots, (1,)), (7, 0))


def test_within_accumulation_there_is_no_snapshot() -> None:
    engine = build(Setup(accumulation=2))
    engine.backward(engine(torch.ones(2)))
    engine.step()
    with two_slots() as slots, pytest.raises(TrainingError, match="within accumulation"):
        engine.snapshot(MemorySnapshots(slots, 0, 1, CPU), step=1, state={})
    engine.destroy()
