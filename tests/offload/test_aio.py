"""Asynchronous reads and writes: the bytes, whatever cuts and carries them, and what a failing disk says."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest
import torch

from raydz.errors import OffloadError
from raydz.offload import aio
from raydz.offload.aio import AioOptions, AioQueue, SwapFile
from raydz.offload.memory import HostMemory
from raydz.ops import native
from tests.support.disks import full_disk, loop_disk, needs_mounts

__all__ = ["needs_mounts"]
pytestmark = pytest.mark.native
PAGE, MIB = 4096, 1 << 20
BACKENDS = pytest.mark.parametrize("use_io_uring", [True, False], ids=["io_uring", "threads"])


@pytest.fixture(autouse=True)
def kernels():
    if native.load() is None:
        pytest.skip("raydz was installed without its compiled kernels")


@pytest.fixture
def memory():
    memory = HostMemory(1 << 28, pinned=False)
    yield memory
    memory.close()


def random_bytes(numel: int, memory: HostMemory) -> torch.Tensor:
    data = memory.empty(numel, torch.uint8)
    return data.copy_(torch.randint(0, 256, (numel,), dtype=torch.uint8))


def content(path: os.PathLike[str] | str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@BACKENDS
@pytest.mark.parametrize("numel", [0, PAGE, 3 * PAGE, MIB - PAGE, MIB + PAGE, 5 * MIB])
@pytest.mark.parametrize("is_registered", [True, False])
def test_what_is_written_is_in_the_file_and_comes_back(tmp_path, memory, use_io_uring, numel, is_registered):
    file = SwapFile(str(tmp_path / "swap"))
    data, back = random_bytes(numel, memory), memory.empty(numel, torch.uint8)
    options = AioOptions(use_io_uring=use_io_uring, block_size=256 << 10)
    queue = AioQueue(options, [file] if is_registered else [], [data, back] if is_registered else [])
    assert queue.uses_io_uring == use_io_uring
    queue.write(file, 2 * PAGE, data).wait()
    assert content(file.path) == (b"\0" * 2 * PAGE + data.numpy().tobytes() if numel else b"")
    queue.read(file, 2 * PAGE, back).wait()
    assert torch.equal(back, data)
    queue.close()
    file.close()


@BACKENDS
def test_any_length_and_offset_where_the_page_cache_is_used(tmp_path, memory, use_io_uring):
    path = tmp_path / "swap"
    path.write_bytes(bytes(10_000))
    file = SwapFile.__new__(SwapFile)
    file.path, file.fd, file.is_direct = str(path), os.open(path, os.O_RDWR), False
    queue = AioQueue(AioOptions(use_io_uring=use_io_uring, block_size=1000), [file])
    data = random_bytes(4097, memory)
    queue.write(file, 13, data).wait()
    assert content(path) == bytes(13) + data.numpy().tobytes() + bytes(10_000 - 13 - 4097)
    back = torch.zeros(4096, dtype=torch.uint8)
    queue.read(file, 14, back).wait()
    assert torch.equal(back, data[1:])
    queue.close()
    file.close()


@BACKENDS
def test_many_requests_at_a_time_by_several_threads(tmp_path, memory, use_io_uring):
    file = SwapFile(str(tmp_path / "swap"))
    queue = AioQueue(AioOptions(64 << 10, 4, thread_count=3, use_io_uring=use_io_uring), [file])
    parts = [random_bytes((1 + i % 7) * PAGE * 5, memory) for i in range(40)]
    starts = [sum(part.numel() for part in parts[:i]) for i in range(len(parts))]
    for transfer in [queue.write(file, at, part) for at, part in zip(starts, parts, strict=True)]:
        transfer.wait()
    assert content(file.path) == b"".join(part.numpy().tobytes() for part in parts)
    backs = [memory.empty(part.numel(), torch.uint8) for part in parts]
    for transfer in reversed([queue.read(file, at, back) for at, back in zip(starts, backs, strict=True)]):
        transfer.wait()
    assert all(torch.equal(back, part) for back, part in zip(backs, parts, strict=True))
    queue.close()
    file.close()


def counts_of(tmp_path, memory, options: AioOptions):
    file = SwapFile(str(tmp_path / "swap"))
    queue = AioQueue(options, [file])
    queue.write(file, 0, random_bytes(4 * MIB, memory)).wait()
    counts = queue.counts
    queue.close()
    file.close()
    os.unlink(file.path)
    return counts


def test_each_option_has_its_effect(tmp_path, memory):
    def counts(**options):
        return counts_of(tmp_path, memory, AioOptions(**options))

    assert counts(block_size=MIB).blocks == 4
    plain = counts(block_size=64 << 10, queue_depth=8)
    assert plain.blocks == 64
    assert plain.most_in_flight == 8
    assert plain.calls <= 64
    assert plain.begun_in_between > 0
    assert counts(block_size=64 << 10, queue_depth=2).most_in_flight == 2
    assert counts(block_size=64 << 10, queue_depth=8, single_submit=True).calls > 64
    batches = counts(block_size=64 << 10, queue_depth=8, overlap_events=False)
    assert batches.begun_in_between == 0
    assert batches.most_in_flight == 8


@BACKENDS
def test_threads_are_as_many_as_asked(tmp_path, use_io_uring):
    before = len(os.listdir("/proc/self/task"))
    file = SwapFile(str(tmp_path / "swap"))
    queue = AioQueue(AioOptions(queue_depth=4, thread_count=3, use_io_uring=use_io_uring), [file])
    assert len(os.listdir("/proc/self/task")) - before == (3 if use_io_uring else 12)
    queue.close()
    file.close()


@BACKENDS
def test_a_read_waits_for_the_write_of_its_memory(tmp_path, memory, use_io_uring):
    file = SwapFile(str(tmp_path / "swap"))
    queue = AioQueue(AioOptions(64 << 10, use_io_uring=use_io_uring), [file])
    old, new = random_bytes(8 * MIB, memory), random_bytes(8 * MIB, memory)
    queue.write(file, 8 * MIB, old).wait()
    first = new.clone()
    queue.read(file, 8 * MIB, new, after=queue.write(file, 0, new)).wait()
    assert torch.equal(new, old)
    assert content(file.path)[: 8 * MIB] == first.numpy().tobytes()
    queue.close()
    file.close()


@BACKENDS
def test_what_follows_a_failed_write_is_not_done(tmp_path, memory, use_io_uring):
    file = SwapFile(str(tmp_path / "swap"))
    queue = AioQueue(AioOptions(use_io_uring=use_io_uring), [])
    readable = SwapFile.__new__(SwapFile)
    readable.path, readable.fd, readable.is_direct = file.path, os.open(file.path, os.O_RDONLY), False
    data = random_bytes(PAGE, memory)
    before = data.clone()
    write = queue.write(readable, 0, data)
    with pytest.raises(OffloadError, match="ECANCELED"):
        queue.read(file, 0, data, after=write).wait()
    with pytest.raises(OffloadError, match=f"errno {errno.EBADF} "):
        write.wait()
    assert torch.equal(data, before)
    queue.close()
    file.close()
    readable.close()


@BACKENDS
def test_a_file_that_ends_early_is_an_error(tmp_path, memory, use_io_uring):
    file = SwapFile(str(tmp_path / "swap"))
    os.truncate(file.path, MIB + 100)
    queue = AioQueue(AioOptions(256 << 10, use_io_uring=use_io_uring), [file])
    with pytest.raises(OffloadError, match=r"swap(.|\n)*the file ends before, at byte 1\d{6}"):
        queue.read(file, 0, memory.empty(2 * MIB, torch.uint8)).wait()
    queue.close()
    file.close()


def test_what_direct_io_cannot_do_is_refused_before(tmp_path, memory):
    file = SwapFile(str(tmp_path / "swap"))
    queue = AioQueue(AioOptions(), [file])
    data = memory.empty(2 * PAGE, torch.uint8)
    for offset, part in ((1, data), (0, data[:-1]), (0, data[8 : 8 + PAGE])):
        with pytest.raises(OffloadError, match="multiples of 4096"):
            queue.write(file, offset, part)
    queue.close()
    file.close()


@BACKENDS
def test_a_disk_that_is_full_ends_the_write_with_its_errno(tmp_path, memory, use_io_uring, needs_mounts):
    with full_disk(tmp_path / "disk", 4 * MIB) as folder:
        file = SwapFile(str(folder / "swap"))
        queue = AioQueue(AioOptions(use_io_uring=use_io_uring), [file])
        with pytest.raises(OffloadError) as caught:
            queue.write(file, 0, random_bytes(8 * MIB, memory)).wait()
        assert f"errno {errno.ENOSPC} (ENOSPC)" in str(caught.value)
        assert file.path in str(caught.value)
        with pytest.raises(OffloadError, match=r"free(.|\n)*8.0 MiB for this rank"):
            file.allocate(8 * MIB)
        queue.close()
        file.close()


def test_a_disk_that_turns_out_to_be_full_later_says_so_too(tmp_path, memory, needs_mounts):
    """Blocks of a thin disk are given out and then cannot be written."""
    with loop_disk(tmp_path / "disk", 64 * MIB, 16 * MIB) as disk:
        file = SwapFile(str(disk.path / "swap"))
        file.allocate(32 * MIB)
        queue = AioQueue(AioOptions(), [file])
        with pytest.raises(OffloadError, match=rf"errno {errno.ENOSPC} "):
            queue.write(file, 0, random_bytes(32 * MIB, memory)).wait()
        queue.close()
        file.close()


@BACKENDS
def test_a_disk_that_breaks_ends_reads_and_writes_with_their_errno(tmp_path, memory, use_io_uring, needs_mounts):
    with loop_disk(tmp_path / "disk", 64 * MIB, 48 * MIB) as disk:
        file = SwapFile(str(disk.path / "swap"))
        file.allocate(32 * MIB)
        queue = AioQueue(AioOptions(use_io_uring=use_io_uring), [file])
        data = random_bytes(4 * MIB, memory)
        queue.write(file, 0, data).wait()
        disk.cut(MIB)
        with pytest.raises(OffloadError, match=rf"read(.|\n)*errno {errno.EIO} \(EIO\)"):
            queue.read(file, 0, data).wait()
        disk.break_down()
        with pytest.raises(OffloadError, match=rf"write(.|\n)*errno {errno.EIO} \(EIO\)"):
            queue.write(file, 0, data).wait()
        queue.close()
        file.close()


@BACKENDS
def test_a_disk_that_does_not_answer_ends_in_an_error_not_in_a_hang(tmp_path, memory, use_io_uring, needs_mounts):
    with loop_disk(tmp_path / "disk", 64 * MIB, 48 * MIB) as disk:
        file = SwapFile(str(disk.path / "swap"))
        file.allocate(16 * MIB)
        queue = AioQueue(AioOptions(use_io_uring=use_io_uring, timeout_s=0.5), [file])
        begun = time.monotonic()
        with disk.frozen():
            transfer = queue.write(file, 0, random_bytes(PAGE, memory))
            with pytest.raises(OffloadError, match="ETIMEDOUT"):
                transfer.wait()
            queue.close()
        assert time.monotonic() - begun < 10
        transfer.wait()  # it answers after all
        file.close()


def test_a_wait_can_be_interrupted(tmp_path, memory, needs_mounts):
    def interrupt(*_):
        raise InterruptedError

    with loop_disk(tmp_path / "disk", 64 * MIB, 48 * MIB) as disk:
        file = SwapFile(str(disk.path / "swap"))
        file.allocate(16 * MIB)
        queue = AioQueue(AioOptions(timeout_s=30), [file])
        before = signal.signal(signal.SIGALRM, interrupt)
        with disk.frozen():
            transfer = queue.write(file, 0, random_bytes(PAGE, memory))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(InterruptedError):
                transfer.wait()
        signal.signal(signal.SIGALRM, before)
        transfer.wait()
        queue.close()
        file.close()


def test_waiting_lets_other_threads_run(tmp_path, memory):
    file = SwapFile(str(tmp_path / "swap"))
    queue = AioQueue(AioOptions(), [file])
    transfers = [queue.write(file, i * MIB, random_bytes(MIB, memory)) for i in range(16)]
    waiters = [threading.Thread(target=transfer.wait) for transfer in transfers]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(timeout=30)
    assert all(transfer.is_done() for transfer in transfers)
    queue.close()
    file.close()


def test_what_was_not_begun_is_dropped_by_close(tmp_path, memory):
    file = SwapFile(str(tmp_path / "swap"))
    queue = AioQueue(AioOptions(PAGE, queue_depth=1), [file])
    transfer = queue.write(file, 0, random_bytes(16 * MIB, memory))
    queue.close()
    with pytest.raises(OffloadError, match="ECANCELED"):
        transfer.wait()
    with pytest.raises(OffloadError, match="ECANCELED"):
        queue.write(file, 0, random_bytes(PAGE, memory)).wait()
    file.close()


def test_a_file_system_without_direct_io_is_used_and_named_once(tmp_path, monkeypatch, memory):
    said: list[str] = []
    monkeypatch.setattr(aio, "say_once", said.append)
    really_open = os.open

    def without_direct(path, flags, *rest, **kwargs):
        if flags & os.O_DIRECT:
            really_open(path, flags & ~os.O_DIRECT, *rest)
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, *rest, **kwargs)

    monkeypatch.setattr(os, "open", without_direct)
    file = SwapFile(str(tmp_path / "swap"))
    assert not file.is_direct
    assert len(said) == 1 and str(tmp_path) in said[0]
    queue = AioQueue(AioOptions(), [file])
    data = random_bytes(1001, memory)
    queue.write(file, 5, data).wait()
    assert content(file.path)[5:] == data.numpy().tobytes()
    queue.close()
    file.close()


def test_a_place_that_cannot_be_written_is_named():
    with pytest.raises(OffloadError, match=r"/proc/swap(.|\n)*errno"):
        SwapFile("/proc/swap")
