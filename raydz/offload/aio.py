"""Reads and writes between tensors' memory and files that run behind the caller's back. Layer 3.

Above: `nvme.py`. Below: `native/aio.cpp`, which cuts them into blocks for io_uring or threads. README.md, "NVMe".
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raydz import log
from raydz.errors import OffloadError
from raydz.ops import native
from raydz.units import format_bytes

ALIGNMENT = 4096
"""Of addresses, lengths and offsets: what every device wants of reads and writes past the page cache."""

_WAIT_SLICE_S = 0.2  # a wait looks for signals so often
_CLOSE_S = 10.0
_abandoned: list[object] = []  # memory and files of queues whose device never answered

_REMEDIES = {
    errno.ENOSPC: "free space there, or set nvme_path to a larger disk",
    errno.EDQUOT: "raise the quota, or set nvme_path to another disk",
    errno.ETIMEDOUT: "look at the disk (dmesg, smartctl); set nvme_path to another one",
    errno.EACCES: "make the folder writable, or set nvme_path to one that is",
    errno.EROFS: "set nvme_path to a folder that can be written",
}
_DEFAULT_REMEDY = "look at the disk (dmesg, smartctl), then start again from the last checkpoint"


@dataclass(frozen=True)
class AioOptions:
    """How a queue works; the names of DeepSpeed's `aio` section, with its defaults.

    Args:
        block_size: bytes of one read or write.
        queue_depth: blocks in flight, for each thread.
        thread_count: threads that submit and collect, each with a ring of its own.
        single_submit: hand each block over by itself.
        overlap_events: begin new blocks while others are in flight; False: batch by batch.
        use_io_uring: False: `queue_depth` threads for each of `thread_count`, in blocking reads and writes.
        timeout_s: how long a wait lasts before the device counts as broken.
    """

    block_size: int = 1 << 20
    queue_depth: int = 8
    thread_count: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_io_uring: bool = True
    timeout_s: float = 300.0


class AioCounts(NamedTuple):
    """Of a queue since its start.

    Args:
        calls: of the system, that hand blocks over or wait for them.
        begun_in_between: blocks begun while others of their thread were in flight; 0 without `overlap_events`.
    """

    blocks: int
    calls: int
    most_in_flight: int
    begun_in_between: int


class SwapFile:
    """A new file that holds raw bytes for this process alone, past the page cache where the file system has that.

    Attributes:
        is_direct: addresses, lengths and offsets must be multiples of `ALIGNMENT`.

    Raises:
        OffloadError: it cannot be made there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.is_direct = hasattr(os, "O_DIRECT")
        try:
            self.fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise failure(error.errno or errno.EIO, "open", path) from error
            self._open_buffered(flags & ~os.O_EXCL)

    def _open_buffered(self, flags: int) -> None:
        self.is_direct = False
        try:
            self.fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise failure(error.errno or errno.EIO, "open", self.path) from error
        say_once(f"{os.path.dirname(self.path)} has no direct I/O: reads and writes go through the page cache")

    def allocate(self, num_bytes: int) -> None:
        """Give it its whole size now, so that no later write can find the disk full.

        Raises:
            OffloadError: there is less free space.
        """
        there = os.fstatvfs(self.fd)
        free = there.f_bavail * there.f_frsize
        if num_bytes > free:
            raise _too_small(self.path, num_bytes, free)
        if num_bytes == 0:
            return
        try:
            os.posix_fallocate(self.fd, 0, num_bytes)
        except OSError as error:
            raise failure(error.errno or errno.EIO, f"allocation of {format_bytes(num_bytes)}", self.path) from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Transfer:
    """A read or write under way. Its memory must not be touched before `wait` returns."""

    def __init__(self, queue: AioQueue, request: int, file: SwapFile, memory: Tensor, is_write: bool) -> None:
        self._queue, self.request, self._file, self._memory = queue, request, file, memory
        self._verb = "write" if is_write else "read"
        self._failure: OffloadError | None = None
        self._is_done = False

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._is_done or self._poll(0.0)

    def wait(self) -> None:
        """Blocking, until every byte was moved. Can be called again.

        Raises:
            OffloadError: with path, errno and offset; or the device did not answer in time.
        """
        limit = self._queue.options.timeout_s
        deadline = time.monotonic() + limit
        while not self._is_done and not self._poll(min(_WAIT_SLICE_S, limit)):
            if time.monotonic() > deadline:
                self._queue.is_stuck = True
                raise failure(errno.ETIMEDOUT, self._verb, self._file.path, f"no answer in {limit:g} s")
        if self._failure is not None:
            raise self._failure

    def _poll(self, timeout_s: float) -> bool:
        outcome = self._queue.native.wait(self.request, timeout_s)
        if outcome is None:
            return False
        error, offset = outcome
        self._is_done = True
        if error != 0:
            self._failure = failure(error, self._verb, self._file.path, f"at byte {offset}")
        return True


class AioQueue:
    """Moves bytes between memory and files, several blocks at a time.

    Args:
        files: registered with the kernel; they must stay open until `close`.
        buffers: registered with the kernel, so that it need not look up their pages each time.

    Attributes:
        is_stuck: a wait ran out of time; memory of this queue may still be written to.

    Raises:
        NativeError: raydz was installed without its compiled kernels.
    """

    def __init__(self, options: AioOptions, files: Sequence[SwapFile], buffers: Sequence[Tensor] = ()) -> None:
        self.options = options
        self.is_stuck = False
        self._kept = (list(files), list(buffers))
        self.native = native.require().AioQueue(
            [file.fd for file in files],
            [as_bytes(buffer) for buffer in buffers if buffer.numel() > 0],
            options.block_size,
            options.queue_depth,
            options.thread_count,
            options.single_submit,
            options.overlap_events,
            not options.use_io_uring,
        )
        if self.native.ring_error:
            reason = os.strerror(self.native.ring_error)
            say_once(f"io_uring cannot be used here ({reason}): threads read and write instead")
        if self.native.buffers_error:
            reason = os.strerror(self.native.buffers_error)
            say_once(f"buffers cannot be registered with io_uring ({reason}; ulimit -l): their pages are looked up")

    @property
    def uses_io_uring(self) -> bool:
        return self.native.uses_io_uring

    @property
    def counts(self) -> AioCounts:
        return AioCounts(*self.native.counts())

    def read(self, file: SwapFile, offset: int, memory: Tensor, after: Transfer | None = None) -> Transfer:
        """Begin to fill `memory` (contiguous, on the host) with the file's bytes from `offset` on.

        Args:
            after: a transfer of this queue that must have succeeded before: the write of the same memory.
        """
        return self._begin(file, offset, memory, after, is_write=False)

    def write(self, file: SwapFile, offset: int, memory: Tensor) -> Transfer:
        """Begin to write `memory` (contiguous, on the host) to the file from `offset` on."""
        return self._begin(file, offset, memory, None, is_write=True)

    def _begin(
        self, file: SwapFile, offset: int, memory: Tensor, after: Transfer | None, *, is_write: bool
    ) -> Transfer:
        data = as_bytes(memory)
        misaligned = [value % ALIGNMENT for value in (offset, data.numel(), data.data_ptr() if data.numel() else 0)]
        if file.is_direct and (any(misaligned) or self.options.block_size % ALIGNMENT):
            raise failure(
                errno.EINVAL,
                "write" if is_write else "read",
                file.path,
                f"offset {offset}, {data.numel()} bytes, address {data.data_ptr():#x}, "
                f"blocks of {self.options.block_size}: not all multiples of {ALIGNMENT}",
            )
        request = self.native.submit(is_write, file.fd, data, offset, 0 if after is None else after.request)
        return Transfer(self, request, file, data, is_write)

    def close(self) -> None:
        """Drop what was not begun, wait for the rest; the kernel lets go of files and buffers.

        A device that does not answer is left to itself: its memory and files are then kept for the process's life.
        """
        if not self.native.close(1.0 if self.is_stuck else _CLOSE_S):
            _abandoned.append((self.native, self._kept))


def as_bytes(memory: Tensor) -> Tensor:
    """The same memory as bytes."""
    return memory.detach().view(-1).view(torch.uint8)


@functools.cache
def say_once(message: str) -> None:
    log.get(__name__).warning(message)


def failure(number: int, verb: str, path: str, detail: str = "") -> OffloadError:
    """What is raised for an errno."""
    name = errno.errorcode.get(number, "unknown")
    reason = "the file ends before" if number == errno.ENODATA else os.strerror(number)
    return OffloadError(
        f"{verb} failed on an offload file",
        where=path,
        got=f"errno {number} ({name}): {reason}" + (f", {detail}" if detail else ""),
        remedy=_REMEDIES.get(number, _DEFAULT_REMEDY),
    )


def _too_small(path: str, asked: int, free: int) -> OffloadError:
    return OffloadError(
        "the disk has too little space for what is offloaded to it",
        where=path,
        got=f"{format_bytes(free)} free",
        wanted=f"{format_bytes(asked)} for this rank",
        remedy=_REMEDIES[errno.ENOSPC] + "; more ranks, or 16-bit states, need less of each",
    )
