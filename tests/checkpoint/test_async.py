"""Saves in the background: the state of the moment, training that goes on, and a commit that all ranks hear of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from raydz.checkpoint import snapshot
from raydz.checkpoint.snapshot import HostImage
from raydz.errors import CheckpointError, TrainingError
from raydz.storage import StoreUnavailable
from raydz.storage.local import LocalStore
from raydz.storage.local_writer import LocalWriter
from tests.checkpoint.states import Setup, assert_same_bits, build, only_checkpoint, stored_tensors, train

SLOW_S = 0.15


@contextmanager
def slow_copies():
    """The snapshot begins late: whatever changes the state in between without waiting is in the file."""
    usual = snapshot.fill_image

    def late(plan, image):
        time.sleep(SLOW_S)
        usual(plan, image)

    snapshot.fill_image = late
    try:
        yield
    finally:
        snapshot.fill_image = usual


# -- what is saved ----------------------------------------------------------------------------------------------------


def save_both_ways(rank, world_size, root, setups):
    """The same state at once and in the background, while training goes on over the second."""
    for name, setup in setups.items():
        engine = build(setup)
        train(engine, 1, 2)
        engine.save_checkpoint(f"{root}/{name}/sync")
        with slow_copies():
            handle = engine.save_checkpoint(f"{root}/{name}/async", async_save=True)
            engine.module.seen.fill_(12345)  # what a forward may do to a buffer
            train(engine, 3, 4)
        assert handle.result(20) == f"{root}/{name}/async/step-0000000002"
        engine.destroy()


SETUPS = {
    "plain": Setup(),
    "sharded": Setup(stage=1),
    "half": Setup(stage=2, bf16=True),
    "whole": Setup(stage=3, bf16=True, tied=True),
}


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_file_holds_the_state_of_the_call_although_training_went_on(ranks, tmp_path, world_size):
    ranks(world_size).run(save_both_ways, str(tmp_path), SETUPS)
    for name in SETUPS:
        assert_same_bits(stored_tensors(tmp_path / name / "async"), stored_tensors(tmp_path / name / "sync"))


def change_by_gathered(engine):
    with torch.no_grad(), engine.gathered(modify=True):
        for parameter in engine.module.parameters():
            parameter.fill_(3.0)


def change_by_load(engine):
    engine.load_full_state_dict({name: torch.zeros_like(t) for name, t in engine.full_state_dict().items()})


def change_by_thawing(engine):
    engine.set_trainable("p0", False)
    train(engine, 3, 3)


def change_by_checkpoint(engine):
    engine.load_checkpoint(Path(engine.test_root) / "other")


def change_by_update(engine):
    train(engine, 3, 3)


@pytest.mark.parametrize(
    "change", [change_by_update, change_by_gathered, change_by_load, change_by_thawing, change_by_checkpoint]
)
def test_whatever_changes_weights_waits_for_the_snapshot(tmp_path, change):
    engine = build(Setup(stage=1))
    engine.test_root = tmp_path
    engine.save_checkpoint(tmp_path / "other")
    train(engine, 1, 2)
    engine.save_checkpoint(tmp_path / "sync")
    with slow_copies():
        handle = engine.save_checkpoint(tmp_path / "async", async_save=True)
        change(engine)
    handle.result(20)
    assert_same_bits(stored_tensors(tmp_path / "async"), stored_tensors(tmp_path / "sync"))
    engine.destroy()


def test_average_in_the_weights_place_waits_for_the_snapshot(tmp_path):
    import raydz.engine
    from tests.checkpoint.states import Odd

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine = raydz.engine.initialize(Odd(Setup().shapes, False), config, device="cpu", ema_decay=0.9)
    train(engine, 1, 2)
    engine.save_checkpoint(tmp_path / "sync")
    with slow_copies():
        handle = engine.save_checkpoint(tmp_path / "async", async_save=True)
        with engine.averaged():
            handle.wait(20)
    assert_same_bits(stored_tensors(tmp_path / "async"), stored_tensors(tmp_path / "sync"))
    engine.destroy()


def test_buffers_are_those_of_the_call_although_a_forward_may_change_them(tmp_path):
    engine = build(Setup())
    with slow_copies():
        handle = engine.save_checkpoint(tmp_path, async_save=True)
        engine.module.seen.fill_(12345)
    handle.result(20)
    assert stored_tensors(tmp_path)["buffer", "seen"].tolist() == [11]
    engine.destroy()


def test_state_beside_the_tensors_is_that_of_the_call(tmp_path):
    engine, state = build(Setup()), {"epoch": [1]}
    handle = engine.save_checkpoint(tmp_path, client_state=state, async_save=True)
    state["epoch"].append(2)
    train(engine, 1, 1)
    handle.result(20)
    assert engine.load_checkpoint(tmp_path)[1] == {"epoch": [1]}
    assert engine.global_steps == 0
    engine.destroy()


def test_save_within_accumulation_is_refused(tmp_path):
    engine = build(Setup(accumulation=2))
    engine.backward(engine(torch.ones(2)))
    engine.step()
    with pytest.raises(TrainingError, match="within accumulation"):
        engine.save_checkpoint(tmp_path, async_save=True)
    engine.destroy()


# -- one at a time, from one image ------------------------------------------------------------------------------------


class Gated(LocalStore):
    """Holds data files back until the gate is opened."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.gate, self.order = threading.Event(), []

    def writer(self, key, expected_bytes=None):
        self.order.append(key)
        assert self.gate.wait(30)
        return super().writer(key, expected_bytes)


def test_training_goes_on_while_the_store_is_slow_and_a_second_save_waits(tmp_path):
    engine, store = build(Setup()), Gated(tmp_path)
    first = engine.save_async(store, "a", step=0, state={})
    train(engine, 1, 3)
    assert not first.done and not first.wait(0.01) and first.total_s is None
    threading.Timer(0.2, store.gate.set).start()
    second = engine.save_async(store, "b", step=3, state={})
    assert first.done and second.blocked_s > 0.1, "the second waits for the first, and says so"
    assert (first.result(20), second.result(20)) == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert first.num_bytes == first.total_bytes == (tmp_path / store.order[0]).stat().st_size
    assert engine.take_save_blocked_s() == pytest.approx(first.blocked_s + second.blocked_s)
    assert engine.take_save_blocked_s() == 0.0
    engine.destroy()


def test_loading_and_a_save_at_once_wait_for_the_one_in_flight(tmp_path):
    engine, store = build(Setup()), Gated(tmp_path)
    train(engine, 1, 1)
    for follow in (lambda: engine.load_checkpoint(tmp_path), lambda: engine.save_checkpoint(tmp_path / "other")):
        store.gate.clear()
        handle = engine.save_async(store, f"step-{len(store.order):010d}", step=1, state={})
        threading.Timer(0.1, store.gate.set).start()
        follow()
        assert handle.done
    engine.destroy()


def test_destroy_waits_for_the_save_in_flight_and_frees_its_memory(tmp_path):
    engine, store = build(Setup()), Gated(tmp_path)
    handle = engine.save_async(store, "a", step=0, state={})
    threading.Timer(0.1, store.gate.set).start()
    engine.destroy()
    assert handle.done and handle.error is None and engine._saves._image.num_bytes == 0


def test_save_that_is_not_waited_for_any_longer_is_named(tmp_path, caplog):
    engine, store = build(Setup()), Gated(tmp_path)
    handle = engine.save_async(store, "a", step=0, state={})
    with pytest.raises(CheckpointError, match="has not ended") as caught:
        handle.result(0.01)
    assert caught.value.where == f"{tmp_path}/a"
    with pytest.raises(CheckpointError, match="has not ended"):
        engine.settle_saves(0.01)
    engine.close_saves(0.01)
    assert "given up" in caplog.text
    store.gate.set()
    engine.settle_saves()
    engine.destroy()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def save_often(rank, world_size, num_saves):
    """Resident memory after each save of 3.6 MB, and the image's address and the threads, which stay the same."""
    engine, memory, places = build(Setup(stage=1, shapes=((600, 500),))), [], set()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        store = LocalStore(root)
        for number in range(num_saves):
            train(engine, 1, 1)
            engine.save_async(store, f"s{number}", step=1, state={}).result(60)
            store.delete(store.list(f"s{number}/"))
            memory.append(resident_bytes())
            places.add(engine._saves._image.bytes.data_ptr())
    threads = [thread.name for thread in threading.enumerate()]
    engine.destroy()
    return memory, places, threads


@pytest.mark.slow
def test_memory_stays_flat_over_a_hundred_saves(ranks):
    ((memory, places, threads),) = ranks(1).run(save_often, 110)
    first, last = sorted(memory[10:30])[10], sorted(memory[-20:])[10]
    assert last - first < 8 << 20, "two images, where eighty saves have followed"
    assert len(places) == 1 and sum(name.startswith("raydz-save") for name in threads) <= 1


def test_host_that_lacks_the_memory_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no host memory") as caught:
        HostImage(pinned=False).reserve(1 << 60)
    assert "async_save" in caught.value.remedy
    engine = build(Setup())
    monkeypatch.setattr(HostImage, "reserve", lambda self, n: (_ for _ in ()).throw(caught.value))
    handle = engine.save_checkpoint(tmp_path, async_save=True)
    train(engine, 1, 1)  # nothing hangs
    with pytest.raises(CheckpointError, match="no host memory"):
        handle.result(20)
    engine.destroy()


# -- failures ---------------------------------------------------------------------------------------------------------


class Failing(LocalStore):
    """Fails at one point of a save."""

    def __init__(self, root, fails_at: str) -> None:
        super().__init__(root)
        self.fails_at = fails_at

    def writer(self, key, expected_bytes=None):
        if self.fails_at == "bug":
            raise ZeroDivisionError("a bug in a store")
        if self.fails_at == "write":
            self._refuse()
        return super().writer(key, expected_bytes)

    def head(self, key):
        return None if self.fails_at == "head" and key.endswith("safetensors") else super().head(key)

    def put(self, key, data, *, if_absent=False):
        if self.fails_at == "put":
            self._refuse()
        super().put(key, data, if_absent=if_absent)

    def _refuse(self):
        raise StoreUnavailable("the bucket is on fire", where=self.uri)


def save_with_faults(rank, world_size, root, cases):
    """What each rank hears of saves that fail on one of them; then of one that does not."""
    engine, told = build(Setup(stage=1)), []
    train(engine, 1, 1)
    for number, (bad_rank, fails_at) in enumerate(cases):
        store = Failing(root, fails_at) if rank == bad_rank else LocalStore(root)
        handle = engine.save_async(store, f"bad-{number}", step=1, state={})
        train(engine, 2, 2)
        with pytest.raises(CheckpointError) as caught:
            handle.result(30)
        told.append(str(caught.value))
    engine.save_async(LocalStore(root), "good", step=2, state={}).result(30)
    engine.destroy()
    return told


def test_save_that_fails_on_one_rank_is_every_ranks_error_and_the_next_one_works(ranks, tmp_path):
    cases = [(0, "write"), (1, "write"), (1, "bug"), (0, "head"), (0, "put")]
    told = ranks(2).run(save_with_faults, str(tmp_path), cases)
    assert told[0] == told[1]
    for (bad_rank, _), text in zip(cases, told[0], strict=True):
        assert "not saved" in text and f"rank {bad_rank}: " in text
    assert "on fire" in told[0][0] and "ZeroDivisionError" in told[0][2] and "data file" in told[0][3]
    left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"bad-4", "good"}, "after an unknown commit the files stay"
    assert only_checkpoint(tmp_path).name == "good"


def save_without_a_peer(rank, world_size, root):
    """Rank 1 does not come to the second save."""
    engine = build(Setup(stage=1))
    engine.save_async(LocalStore(root), "first", step=0, state={}).result(30)
    text, started = "", time.monotonic()
    if rank == 0:
        handle = engine.save_async(LocalStore(root), "second", step=0, state={}, timeout_s=0.5)
        with pytest.raises(CheckpointError) as caught:
            handle.result(20)
        text = str(caught.value)
    engine.comms.world.barrier()
    engine.destroy()
    return text, time.monotonic() - started


def test_rank_that_never_comes_is_named_within_the_time(ranks, tmp_path):
    (text, seconds), _ = ranks(2).run(save_without_a_peer, str(tmp_path))
    assert "no word from rank 1 within 0.5 s" in text and seconds < 10
    assert only_checkpoint(tmp_path).name == "first"


def test_what_follows_a_commit_sees_it_and_cannot_undo_it(tmp_path, caplog):
    engine, seen = build(Setup()), []

    def hook(folder):
        seen.append((folder, (tmp_path / folder / "manifest.json").exists(), threading.current_thread().name))
        raise ValueError("a hook with a bug")

    handle = engine.save_async(LocalStore(tmp_path), "a", step=0, state={}, after_commit=hook)
    assert handle.result(20) == f"{tmp_path}/a"
    assert seen == [("a", True, "raydz-save")] and "a hook with a bug" in caplog.text
    engine.destroy()


_TORN = """
import sys, time
from raydz.storage.local_writer import LocalWriter
from tests.checkpoint.states import Setup, build, train
engine = build(Setup(shapes=((300, 300),)))
train(engine, 1, 1)
engine.save_checkpoint(sys.argv[1], async_save=True).result()
usual = LocalWriter.write
def halfway(self, data, **how):
    usual(self, memoryview(data)[:len(data) // 2])
    print("writing", flush=True)
    time.sleep(60)
LocalWriter.write = halfway
train(engine, 2, 2)
engine.save_checkpoint(sys.argv[1], async_save=True)
for step in range(3, 1000000):
    train(engine, step, step)
"""


def test_process_killed_in_mid_save_leaves_the_checkpoint_before_it(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", _TORN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()
    assert [path for path in (tmp_path / "step-0000000002").rglob("*") if path.is_file()]
    engine = build(Setup(shapes=((300, 300),)))
    assert engine.load_checkpoint(tmp_path)[0].endswith("step-0000000001")
    engine.save_async(LocalStore(tmp_path), "step-0000000002", step=2, state={}).result(20)  # over the torn one
    assert engine.load_checkpoint(tmp_path)[0].endswith("step-0000000002")
    engine.destroy()


def save_and_die(rank, world_size, root):
    """Rank 1 dies while it writes; rank 0 leaves word of what it heard."""
    engine = build(Setup(stage=1))
    engine.save_async(LocalStore(root), "step-0000000000", step=0, state={}).result(30)
    if rank == 1:
        LocalWriter.write = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    handle = engine.save_async(LocalStore(root), "step-0000000001", step=1, state={}, timeout_s=1.0)
    with pytest.raises(CheckpointError) as caught:
        handle.result(20)
    Path(root, f"told-{rank}").write_text(str(caught.value))


@pytest.mark.slow
def test_rank_that_dies_in_mid_save_is_named_and_hangs_nobody(tmp_path):
    from tests.support.ranks import RankFailure, RankPool

    pool = RankPool(2)
    with pytest.raises(RankFailure, match="the process died"):
        pool.run(save_and_die, str(tmp_path), limit_s=60)
    pool.stop()
    assert "no word from rank 1" in (tmp_path / "told-0").read_text()
    assert only_checkpoint(tmp_path).name == "step-0000000000"
