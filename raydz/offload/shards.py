"""Shards of weights on a disk: read ahead into a few pinned buffers, from which they go to the device. Layer 3.

Above: `parameters.py`. Below: `folder.py`, `aio.py`. README.md, "Parameters on a disk".
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.errors import OffloadError
from raydz.offload.aio import ALIGNMENT, AioOptions, AioQueue, Transfer, failure
from raydz.offload.folder import SwapFolder
from raydz.offload.memory import HostMemory

_KEY = "zero_optimization.offload_param"


@dataclass(eq=False)
class _Region:
    """A shard in the file; `view` is the file itself as memory, for whatever is not a gather."""

    offset: int
    num_bytes: int
    view: Tensor


@dataclass(eq=False)
class _Slot:
    """A buffer and the shard that it holds, or will when `read` ends; what `write` brings to the disk of it, which may
    be another one by then. `used` is a copy to the device from it."""

    memory: Tensor
    region: _Region | None = None
    read: Transfer | None = None
    written: _Region | None = None
    write: Transfer | None = None
    used: torch.cuda.Event | None = None


class DiskShards:
    """Shards in a file of this rank's own.

    Args:
        memory: what buffers come from.
        folder: of this alone; it closes it.
        num_slots: buffers.
        slot_numel: most elements of a shard.

    Attributes:
        bytes_read, bytes_written: by gathers and updates, since the start.

    Raises:
        OffloadError: from every method: the disk is too small, or has failed; names path and errno.
    """

    def __init__(
        self, memory: HostMemory, folder: SwapFolder, *, num_slots: int, slot_numel: int, aio: AioOptions,
        pinned: bool = True,
    ) -> None:  # fmt: skip
        self._memory, self._folder, self._pinned, self._aio = memory, folder, pinned, aio
        self._num_slots, self._slot_numel = num_slots, slot_numel
        self._file = folder.create("parameters")
        self._end = self._largest = 0
        self._regions: dict[int, _Region] = {}
        self._gone: dict[int, list[int]] = {}
        """Offsets by size of what was dropped."""
        self._slots: list[_Slot] = []
        self._queue: AioQueue | None = None
        self._lock = threading.RLock()  # updates store what gathers fetch
        self.bytes_read = self.bytes_written = 0

    def shard(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """A new shard as memory, (numel,), zeros: pages of the file that come and go as they are touched."""
        if numel > self._slot_numel:
            raise OffloadError(
                f"the weights of {what} do not fit into a buffer", where=f"{_KEY}.buffer_size", got=self._slot_numel,
                wanted=f"{numel} elements at least", remedy="raise it, or lower reduce_bucket_size, which cuts units",
            )  # fmt: skip
        num_bytes = -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        gone = self._gone.get(num_bytes)
        is_used, offset = bool(gone), gone.pop() if gone else self._end
        try:
            os.posix_fallocate(self._file.fd, offset, num_bytes)
            mapping = mmap.mmap(self._file.fd, num_bytes, offset=offset)
        except OSError as error:
            raise failure(error.errno or errno.EIO, f"allocation for {what}", self._file.path) from error
        view = torch.frombuffer(mapping, dtype=dtype, count=numel)
        if is_used:
            view.zero_()
        self._regions[view.data_ptr()] = _Region(offset, num_bytes, view)
        self._end = max(self._end, offset + num_bytes)
        self._largest = max(self._largest, num_bytes)
        return view

    def drop(self, shard: Tensor) -> None:
        """Nobody uses it any more: its place in the file is for another one."""
        with self._lock:
            region = self._regions[shard.data_ptr()]
            self._forget(region)
            self._land(region)
            del self._regions[shard.data_ptr()]
            self._gone.setdefault(region.num_bytes, []).append(region.offset)

    def has(self, shard: Tensor) -> bool:
        return shard.data_ptr() in self._regions

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self._end

    def read_ahead(self, shard: Tensor) -> bool:
        """Begin to read a shard that will be fetched soon; False: no buffer is idle."""
        with self._lock:
            region = self._regions[shard.data_ptr()]
            if self._holding(region) is None:
                if not any(self._is_idle(slot) for slot in self._all_slots()):
                    return False
                self._read(self._claim(), region)
        return True

    def fetch(self, shard: Tensor, into: Tensor) -> None:
        """Copy a shard to the device, on the current stream. Blocking: until it is read."""
        with self._lock:
            region = self._regions[shard.data_ptr()]
            slot = self._holding(region)
            if slot is None:
                slot = self._claim()
                self._read(slot, region)
            if slot.read is not None:
                slot.read.wait()
                slot.read = None
            into.copy_(self._content(slot, shard), non_blocking=True)
            slot.region = None  # what is fetched again is read again
            if into.is_cuda:
                slot.used = torch.cuda.current_stream(into.device).record_event()

    def store(self, shard: Tensor, values: Tensor) -> None:
        """Write new values; a fetch that comes soon finds them in the buffer. Blocking: until a buffer is free."""
        with self._lock:
            region = self._regions[shard.data_ptr()]
            self._forget(region)
            self._land(region)
            slot = self._claim()
            slot.region = slot.written = region
            self._content(slot, shard).copy_(values)
            assert self._queue is not None
            slot.write = self._queue.write(self._file, region.offset, slot.memory[: region.num_bytes])
            self.bytes_written += region.num_bytes

    def land(self, shard: Tensor) -> None:
        """What was stored of it is in the file, and so in its memory. Blocking."""
        with self._lock:
            self._land(self._regions[shard.data_ptr()])

    def _land(self, region: _Region) -> None:
        for slot in self._slots:
            if slot.write is not None and slot.written is region:
                slot.write.wait()

    def forget(self, shard: Tensor) -> None:
        """What a buffer holds of it is old: its memory was written to, or will be."""
        with self._lock:
            self._forget(self._regions[shard.data_ptr()])

    def finish(self) -> None:
        """Everything is written. Blocking."""
        with self._lock:
            for slot in self._slots:
                self._settle(slot)

    def close(self) -> None:
        """Remove the file. Views of it are what they were, and nobody else's. May be called twice."""
        with self._lock:
            self._close_slots()
            self._file.close()
            self._folder.close()

    def _close_slots(self) -> None:
        if self._queue is not None:
            self._queue.close()
            for slot in self._slots if not self._queue.is_stuck else ():
                self._memory.free(slot.memory)
        self._queue, self._slots = None, []

    # -- buffers -----------------------------------------------------------------------------------------------

    def _all_slots(self) -> list[_Slot]:
        """Made when the first one is needed, as large as the largest shard, and anew where a larger one has come."""
        if self._slots and self._slots[0].memory.numel() < self._largest:
            for slot in self._slots:
                self._settle(slot)
            self._close_slots()
        if self._queue is None:
            num = min(self._num_slots, len(self._regions))
            self._slots = [_Slot(self._buffer()) for _ in range(num)]
            self._queue = AioQueue(self._aio, [self._file], [slot.memory for slot in self._slots])
        return self._slots

    def _buffer(self) -> Tensor:
        return self._memory.empty(self._largest, torch.uint8, "a buffer for weights on a disk", pinned=self._pinned)

    def _content(self, slot: _Slot, shard: Tensor) -> Tensor:
        return slot.memory[: shard.nbytes].view(shard.dtype)

    def _holding(self, region: _Region) -> _Slot | None:
        return next((slot for slot in self._slots if slot.region is region), None)

    def _forget(self, region: _Region) -> None:
        slot = self._holding(region)
        if slot is not None:
            self._settle(slot)
            slot.region = None

    def _is_idle(self, slot: _Slot) -> bool:
        is_written = slot.write is None or slot.write.is_done()
        return slot.region is None and is_written and (slot.used is None or slot.used.query())

    def _claim(self) -> _Slot:
        """An idle buffer; else the one that holds nothing; else the last that was read ahead."""
        slots = self._all_slots()
        slot = next((slot for slot in slots if self._is_idle(slot)), None)
        slot = slot or next((slot for slot in slots if slot.region is None), slots[-1])
        self._settle(slot)
        slot.region = None
        slots.sort(key=lambda other: other is slot)  # the next one is claimed before it
        return slot

    def _settle(self, slot: _Slot) -> None:
        """Wait for all that reads or writes its memory."""
        for transfer in (slot.write, slot.read):
            if transfer is not None:
                transfer.wait()
        if slot.used is not None:
            slot.used.synchronize()
        slot.write = slot.read = slot.used = slot.written = None

    def _read(self, slot: _Slot, region: _Region) -> None:
        assert self._queue is not None
        write = next((other.write for other in self._slots if other.written is region), None)
        slot.region = region
        slot.read = self._queue.read(self._file, region.offset, slot.memory[: region.num_bytes], after=write)
        self.bytes_read += region.num_bytes
