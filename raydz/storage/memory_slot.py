"""A record and an image of bytes in anonymous shared memory, which is gone when the last process that holds it is.

Neighbours: `checkpoint/memory.py` writes a rank's state into one; `orchestrate/` keeps them over the end of the rank's
process. Free of torch. No name in any file system: nothing can be left behind, and /dev/shm may be as small as it is.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from typing import Any

from raydz.errors import StorageError

IMAGE_OFFSET = 1 << 20
"""Where the image begins; the record comes before it."""
_HEAD = struct.Struct("<QI")
_NOTHING = bytes(_HEAD.size)


def new_memory(name: str) -> int:
    """A file descriptor of new, empty memory, for one slot.

    Raises:
        StorageError: this system has no such memory.
    """
    try:
        return os.memfd_create(name)
    except (AttributeError, OSError) as error:
        raise StorageError(
            "no anonymous memory to keep snapshots in", got=repr(error), wanted="Linux 3.17 or newer",
            remedy="set failure.memory_snapshot_every to 0",
        ) from None  # fmt: skip


class MemorySlot:
    """One such memory. A record is there whole or not at all, whenever the process that writes is killed.

    Ownership: the descriptor stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def record(self) -> dict[str, Any] | None:
        """What was committed last; None while something is being written, and before."""
        head = os.pread(self.fd, _HEAD.size, 0)
        if len(head) < _HEAD.size or head == _NOTHING:
            return None
        length, crc = _HEAD.unpack(head)
        text = os.pread(self.fd, min(length, IMAGE_OFFSET), _HEAD.size)
        return json.loads(text) if len(text) == length and zlib.crc32(text) == crc else None

    def forget(self) -> None:
        """Take the record away, before the image changes."""
        os.pwrite(self.fd, _NOTHING, 0)

    def commit(self, record: dict[str, Any]) -> None:
        """Say that the image is whole.

        Raises:
            StorageError: the record is too long.
        """
        text = json.dumps(record).encode()
        if len(text) > IMAGE_OFFSET - _HEAD.size:
            raise StorageError(
                "the state beside the tensors is too long for a snapshot in memory", got=f"{len(text)} bytes",
                wanted=f"{IMAGE_OFFSET - _HEAD.size} at most",
                remedy="keep less beside the tensors, or set failure.memory_snapshot_every to 0",
            )  # fmt: skip
        os.pwrite(self.fd, text, _HEAD.size)
        os.pwrite(self.fd, _HEAD.pack(len(text), zlib.crc32(text)), 0)

    def image_bytes(self) -> int:
        """Size of the image."""
        return max(0, os.fstat(self.fd).st_size - IMAGE_OFFSET)

    def map(self) -> mmap.mmap:
        """The image. Ownership: whoever calls closes it."""
        return mmap.mmap(self.fd, self.image_bytes(), offset=IMAGE_OFFSET)

    def put(self, record: dict[str, Any], image: memoryview) -> None:
        """Take over a copy of another slot. Blocking: for the copy."""
        self.forget()
        os.ftruncate(self.fd, IMAGE_OFFSET + image.nbytes)
        with self.map() as target:
            target[:] = image
        self.commit(record)
