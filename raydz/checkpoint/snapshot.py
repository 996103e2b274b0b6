"""A rank's data file as it will be stored, in host memory: what a save in the background writes from.

Neighbours: `background.py` keeps one image from save to save and copies in its thread; `pieces.py` says what is copied.
See the note "Snapshot" in README.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from raydz.checkpoint.data_file import FilePlan
from raydz.checkpoint.manifest import ITEM_BYTES
from raydz.checkpoint.pieces import DTYPES, StatePiece
from raydz.errors import CheckpointError
from raydz.units import format_bytes


class HostImage:
    """Host memory for one data file: page-aligned, of the exact size, page-locked where a GPU copies into it.

    Ownership: whoever holds it; `reserve` may give the memory back, so no view may be in use then.

    Args:
        fd: of memory to lie in, from byte `offset` on; it is made so large. Left out: memory of its own.
    """

    def __init__(self, *, pinned: bool, fd: int = -1, offset: int = 0) -> None:
        self._pinned, self._fd, self._offset = pinned, fd, offset
        self._memory: mmap.mmap | None = None
        self._whole: Tensor | None = None
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Have room for exactly `num_bytes` (at least 1); memory of that size is kept.

        Raises:
            CheckpointError: the host has not got it.
        """
        if self._whole is not None and self.num_bytes == num_bytes:
            return
        self.release()
        try:
            if self._fd >= 0:
                os.ftruncate(self._fd, self._offset + num_bytes)
            self._memory = mmap.mmap(self._fd, num_bytes, offset=self._offset)
        except (OSError, ValueError, OverflowError) as error:
            raise _no_memory(num_bytes, error) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages: 512 times the page faults, once
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._whole, self.num_bytes = torch.frombuffer(self._memory, dtype=torch.uint8), num_bytes
        if self._pinned:
            code = int(torch.cuda.cudart().cudaHostRegister(self._whole.data_ptr(), num_bytes, 0))
            if code:
                self._whole, self._memory, self.num_bytes = None, None, 0
                raise _no_memory(num_bytes, f"cudaHostRegister answered {code}")

    def release(self) -> None:
        """Give the memory back."""
        if self._whole is not None and self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._whole.data_ptr())
        self._whole, self._memory, self.num_bytes = None, None, 0  # unmapped with its last view

    @property
    def bytes(self) -> Tensor:
        """All of it, (num_bytes,) uint8."""
        assert self._whole is not None, "reserved before it is used"
        return self._whole

    @property
    def view(self) -> memoryview:
        """The same memory for writers and checksums."""
        assert self._memory is not None, "reserved before it is used"
        return memoryview(self._memory)


def _no_memory(num_bytes: int, cause: object) -> CheckpointError:
    return CheckpointError(
        "no host memory for the snapshot of a checkpoint", got=cause, wanted=format_bytes(num_bytes),
        remedy="set checkpoint.async_save to false (async_save=False), which needs none, or use more ranks",
    )  # fmt: skip


def keep_what_forward_changes(pieces: Sequence[StatePiece]) -> list[StatePiece]:
    """The pieces with copies of the module's buffers: all else stays as it is until the next update."""
    return [_copied(piece) if piece.kind == "buffer" else piece for piece in pieces]


def _copied(piece: StatePiece) -> StatePiece:
    values = piece.read().detach().clone()
    return replace(piece, read=lambda: values)


class DeviceCopies:
    """The stream on which a GPU's copies run; of a CPU nothing.

    Made by the thread that trains: what it has launched up to here comes before the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def run(self, plan: FilePlan, image: HostImage) -> None:
        """Fill the image. Blocking: until every byte is there."""
        if self._stream is None:
            fill_image(plan, image)
            return
        with torch.cuda.stream(self._stream):
            fill_image(plan, image)
        self._stream.synchronize()


@torch.no_grad()
def fill_image(plan: FilePlan, image: HostImage) -> None:
    """Copy header and pieces to their places in an image of the plan's size."""
    image.view[: len(plan.header)] = plan.header
    for piece, offset in zip(plan.pieces, plan.offsets, strict=True):
        size = (piece.stop - piece.start) * ITEM_BYTES[piece.dtype]
        if not size:
            continue
        target = image.bytes[offset : offset + size].view(DTYPES[piece.dtype])
        if piece.copy is not None:
            piece.copy(target)
        else:
            _copy(piece.read().detach(), target)


def _copy(source: Tensor, target: Tensor) -> None:
    if source.is_cuda or not source.is_contiguous():
        target.copy_(source, non_blocking=True)
    else:  # torch would start a team of threads beside the one that trains
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
