"""Large files are written past the page cache; what a reader finds does not depend on how."""

from __future__ import annotations

import errno
import mmap
import os
import random

import pytest

from raydz.errors import StorageError
from raydz.storage import direct
from raydz.storage.direct import ALIGNMENT, MIN_BYTES, STAGE_BYTES
from raydz.storage.local import LocalStore


@pytest.fixture
def small_stage(monkeypatch):
    monkeypatch.setattr(direct, "STAGE_BYTES", 2 * ALIGNMENT)


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "sizes",
    [(0,), (1,), (ALIGNMENT,), (ALIGNMENT - 1, 1), (5 * ALIGNMENT + 7,), (3, 4 * ALIGNMENT, 9 * ALIGNMENT + 5, 17)],
)
def test_bytes_arrive_in_order_whatever_their_sizes_and_addresses(tmp_path, small_stage, sizes, shift):
    store, parts = LocalStore(tmp_path), [random.Random(n).randbytes(n + shift) for n in sizes]
    with store.writer("k", expected_bytes=MIN_BYTES) as out:
        for part in parts:
            out.write(aligned(part)[shift:] if len(part) > shift else part[shift:])
        assert out._direct is not None
    assert store.get("k") == b"".join(part[shift:] for part in parts)
    assert out.bytes_written == out.info.bytes == sum(sizes)


def test_a_large_put_equals_what_was_given(tmp_path):
    body = random.Random(3).randbytes(STAGE_BYTES + MIN_BYTES + 77)
    LocalStore(tmp_path).put("k", body)
    assert (tmp_path / "k").read_bytes() == body


def test_what_is_aligned_is_written_from_where_it_lies(tmp_path, monkeypatch):
    calls, usual = [], os.pwrite

    def pwrite(fd, data, offset):
        calls.append((len(data), offset))
        return usual(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with LocalStore(tmp_path).writer("k", expected_bytes=MIN_BYTES) as out:
        out.write(aligned(bytes(10 * ALIGNMENT + 5)))
        assert out._direct._staged == 5
    assert calls == [(10 * ALIGNMENT, 0), (5, 10 * ALIGNMENT)]


@pytest.mark.parametrize("fails", ["open", "write"])
def test_file_systems_without_direct_writes_go_through_the_cache(tmp_path, monkeypatch, small_stage, fails):
    usual_open, usual_write = os.open, os.pwrite
    direct_fds = set()

    def open_(path, flags, *mode):
        if flags & os.O_DIRECT and fails == "open":
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        fd = usual_open(path, flags, *mode)
        if flags & os.O_DIRECT:
            direct_fds.add(fd)
        return fd

    def pwrite(fd, data, offset):
        if fd in direct_fds:
            raise OSError(errno.EINVAL, "not this length")
        return usual_write(fd, data, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    body = random.Random(4).randbytes(5 * ALIGNMENT + 9)
    store = LocalStore(tmp_path)
    with store.writer("k", expected_bytes=MIN_BYTES) as out:
        out.write(aligned(body))
        out.write(body)
    assert store.get("k") == body + body


def test_a_short_write_goes_on_where_it_stopped(tmp_path, monkeypatch):
    usual = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: usual(fd, bytes(data[: 1 + len(data) // 3]), offset))
    body = random.Random(5).randbytes(6 * ALIGNMENT)
    store = LocalStore(tmp_path)
    with store.writer("k", expected_bytes=MIN_BYTES) as out:
        out.write(aligned(body))
    assert store.get("k") == body


def test_a_full_disk_is_told_with_path_and_errno_and_leaves_nothing(tmp_path, monkeypatch):
    def pwrite(fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StorageError, match="cannot write") as caught, LocalStore(tmp_path).writer("k", 10**9) as out:
        out.write(aligned(bytes(2 * ALIGNMENT)))
    assert "ENOSPC" in caught.value.got and caught.value.where == str(tmp_path / "k")
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        LocalStore(tmp_path).put(f"k{number}", bytes(MIN_BYTES))
    assert len(os.listdir("/proc/self/fd")) == before
