"""Where units lie in a tier's file, and the file shown as memory. Layer 3.

Above: `nvme.py`. README.md, "NVMe".
"""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.offload.aio import ALIGNMENT, SwapFile, failure
from raydz.offload.tiers import WEIGHTS, UnitShape


@dataclass(eq=False)
class Place:
    """Where a unit is in the file, and how much of it was ever written; what is behind that is zero.

    The unit's tensors follow one another in whole pages, weights first: states stay unwritten until they are not zero.
    """

    shape: UnitShape
    offset: int
    num_stored: int = 0

    @property
    def names(self) -> list[str]:
        return sorted(self.shape.tensors, key=lambda name: name not in WEIGHTS)

    @property
    def num_bytes(self) -> int:
        return sum(self.size_of(name) for name in self.shape.tensors)

    def size_of(self, name: str) -> int:
        return -(-self.shape.numel * self.shape.tensors[name].itemsize // ALIGNMENT) * ALIGNMENT

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        found, start = {}, 0
        for name in self.names:
            found[name] = memory[start : start + self.size_of(name)].view(self.shape.tensors[name])[: self.shape.numel]
            start += self.size_of(name)
        return found

    def used(self, memory: Tensor) -> int:
        """Bytes up to the last tensor that was written before or is not all zero (the bits of -0 are not)."""
        end = start = 0
        for name in self.names:
            stop = start + self.size_of(name)
            if stop <= self.num_stored or bool(memory[start:stop].view(torch.int64).any()):
                end = stop
            start = stop
        return end


class FileView:
    """A file as memory: pages come and go as they are touched, through the page cache.

    Nobody reads or writes the file in another way between `show` and `withdraw`. A page that the disk cannot read ends
    the process (SIGBUS): memory has no other way to say it.

    Args:
        num_bytes: of the file, which has that size.
    """

    def __init__(self, file: SwapFile, num_bytes: int) -> None:
        self._file = file
        self._mapping = mmap.mmap(file.fd, num_bytes) if num_bytes else None

    def show(self, place: Place) -> dict[str, Tensor]:
        if self._mapping is None or place.num_bytes == 0:
            return place.views(torch.empty(0, dtype=torch.uint8))
        shown = torch.frombuffer(self._mapping, dtype=torch.uint8, count=place.num_bytes, offset=place.offset)
        return place.views(shown)

    def withdraw(self) -> None:
        """Changes are on the disk, and nowhere else. Tensors that were shown must not be touched any more.

        Raises:
            OffloadError: they could not be written.
        """
        if self._mapping is None:
            return
        self._mapping.madvise(mmap.MADV_DONTNEED)
        try:
            os.fdatasync(self._file.fd)
        except OSError as error:
            raise failure(error.errno or errno.EIO, "write", self._file.path) from error
        os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
