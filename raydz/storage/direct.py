"""Appending to a file past the page cache: no second copy in memory, and nothing left to write back at the fsync.

Neighbours: `local_writer.LocalWriter` uses it for large files. See the note "Direct writes" in README.md.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np

ALIGNMENT = 4096
"""Of addresses, offsets and lengths: the page, which no disk's block exceeds."""
STAGE_BYTES = 8 << 20
MIN_BYTES = 4 << 20
"""Smaller files are as fast through the cache."""
_BLOCK_BYTES = 16 << 20


class DirectFile:
    """A new file's bytes, in order. Where the file system has no O_DIRECT they go through the cache after all.

    What is aligned in memory is written from where it lies; all else passes through one aligned block.

    Args:
        path: an empty file.
        fd: it, opened for writing; takes what is not a whole number of blocks. The caller closes it.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._fd, self._offset = fd, 0
        self._direct_fd = _open_direct(path)
        self._stage: mmap.mmap | None = None
        self._staged = 0

    def write(self, view: memoryview) -> None:
        """Append; `view` may be reused afterwards."""
        while len(view):
            if self._direct_fd < 0:
                self._flush()
                self._write_cached(view)
                return
            whole = len(view) // ALIGNMENT * ALIGNMENT
            if not self._staged and whole and _is_aligned(view):
                self._write_direct(view[:whole])
                view = view[whole:]
                continue
            view = self._fill_stage(view)

    def finish(self) -> None:
        """Write what is left, which no alignment fits."""
        self._flush()

    def close(self) -> None:
        """Close what this opened."""
        if self._direct_fd >= 0:
            os.close(self._direct_fd)
            self._direct_fd = -1

    def _fill_stage(self, view: memoryview) -> memoryview:
        """Take in what there is room for; returns the rest."""
        if self._stage is None:
            self._stage = mmap.mmap(-1, STAGE_BYTES)
        count = min(len(view), STAGE_BYTES - self._staged)
        self._stage[self._staged : self._staged + count] = view[:count]
        self._staged += count
        if self._staged == STAGE_BYTES:
            self._staged = 0
            with memoryview(self._stage) as full:
                self._write_direct(full)
        return view[count:]

    def _flush(self) -> None:
        if self._stage is not None and self._staged:
            count, self._staged = self._staged, 0
            with memoryview(self._stage) as stage:
                self._write_cached(stage[:count])

    def _write_direct(self, view: memoryview) -> None:
        while len(view):
            try:
                count = os.pwrite(self._direct_fd, view[:_BLOCK_BYTES], self._offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                count = 0  # this file system opens so, but does not write so
            self._offset += count
            view = view[count:]
            if count % ALIGNMENT or not count:  # a disk that fills up, or no O_DIRECT: the cache takes any length
                self.close()
                self._write_cached(view)
                return

    def _write_cached(self, view: memoryview) -> None:
        while len(view):
            # A short write is legal, and is how a full disk first shows.
            count = os.pwrite(self._fd, view, self._offset)
            self._offset += count
            view = view[count:]


def _open_direct(path: Path) -> int:
    """A descriptor, or -1 where the file system has none of this kind."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):  # os.O_DIRECT is Linux's
        return -1


def _is_aligned(view: memoryview) -> bool:
    return np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT == 0
