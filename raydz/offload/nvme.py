"""Units on a disk: a few slots of host memory through which they pass, and as many that stay as the host has room for.

Layer 3. A `Tier` (`tiers.py`). Below: `folder.py`, `aio.py`. README.md, "NVMe", says what overlaps and why.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raydz.errors import OffloadError
from raydz.offload.aio import AioOptions, AioQueue, Transfer
from raydz.offload.folder import SwapFolder
from raydz.offload.memory import HostMemory
from raydz.offload.places import FileView, Place
from raydz.offload.residents import choose_residents
from raydz.offload.tiers import UnitShape

MIN_SLOTS = 3
"""One that is read, one that is updated, one that is written."""


@dataclass(frozen=True)
class NvmeOptions:
    """How units pass through host memory.

    Args:
        slots: buffers, each as large as the largest unit on the disk; `MIN_SLOTS` at least.
        cache_bytes: most host memory for units that never leave it; None: what the budget has left.
        reserved_bytes: of the budget, for what will be taken from it after the tier.
        pinned: page-lock host memory where a device copies from it.
        reads_ahead: read the next units while one is updated; False: when they are asked for.
        writes_behind: go on while a unit is written; False: when it is.
    """

    slots: int = 4
    cache_bytes: int | None = None
    reserved_bytes: int = 0
    pinned: bool = True
    reads_ahead: bool = True
    writes_behind: bool = True
    aio: AioOptions = field(default_factory=AioOptions)


@dataclass(eq=False)
class _Slot:
    """A buffer and what it holds. `write` ends before `read` begins; both may still be under way."""

    memory: Tensor
    index: int | None = None
    is_held: bool = False
    read: Transfer | None = None
    write: Transfer | None = None


class NvmeTier:
    """Keeps units in a file of this rank's own, and as many as fit in host memory.

    After a failure nothing of it is used: every later call raises it again.

    Args:
        memory: what slots and units that stay come from; closed by whoever made it.
        folder: of this tier alone; it closes it.

    Attributes:
        bytes_read, bytes_written: since the start, for reports.

    Raises:
        OffloadError: the host memory or the disk is too small.
    """

    def __init__(
        self, units: Sequence[UnitShape], memory: HostMemory, folder: SwapFolder, options: NvmeOptions
    ) -> None:
        self._units, self._memory, self._folder, self._options = list(units), memory, folder, options
        self.bytes_read = self.bytes_written = 0
        self._failure: OffloadError | None = None
        self._is_closed = False
        self._ahead: deque[int] = deque()
        self._viewed: set[int] = set()
        self._file_view: FileView | None = None
        self._waits = dict.fromkeys(("disk_read", "disk_write"), 0.0)
        self._slots: list[_Slot] = []
        self._queue: AioQueue | None = None
        self._file = folder.create("optimizer")
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        sizes = [Place(unit, 0).num_bytes for unit in self._units]
        num_slots = max(self._options.slots, MIN_SLOTS)
        cache = self._options.cache_bytes
        room = self._memory.budget_bytes - self._memory.bytes_held - self._options.reserved_bytes
        stay = choose_residents(sizes, room if cache is None else min(cache, room), num_slots, room)
        self._resident = {index: self._allocate(self._units[index]) for index in sorted(stay)}
        self._places: dict[int, Place] = {}
        self._file_bytes = 0
        for index, unit in enumerate(self._units):
            if index not in stay:
                self._places[index] = Place(unit, self._file_bytes)
                self._file_bytes += sizes[index]
        self._file.allocate(self._file_bytes)
        slot_bytes = max((place.num_bytes for place in self._places.values()), default=0)
        for _ in range(min(num_slots, len(self._places))):
            self._slots.append(_Slot(self._empty(slot_bytes, torch.uint8, "a slot of the NVMe tier")))
        self._slot_of: dict[int, _Slot] = {}
        if self._slots:
            self._queue = AioQueue(self._options.aio, [self._file], [slot.memory for slot in self._slots])

    def _allocate(self, unit: UnitShape) -> dict[str, Tensor]:
        return {n: self._empty(unit.numel, dtype, f"{n} of {unit.label}") for n, dtype in unit.tensors.items()}

    def _empty(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        return self._memory.empty(numel, dtype, what, pinned=self._options.pinned)

    @property
    def bytes_held(self) -> dict[str, int]:
        resident = sum(tensor.nbytes for tensors in self._resident.values() for tensor in tensors.values())
        return {"host": resident + sum(slot.memory.nbytes for slot in self._slots), "disk": self._file_bytes}

    @property
    def residents(self) -> frozenset[int]:
        """Units that never leave host memory."""
        return frozenset(self._resident)

    def begin(self, order: Sequence[int]) -> None:
        """The next fetches come in this order; what slots still hold of it is not read again."""
        self._check()
        self._take_views_back()
        self._ahead = deque(index for index in order if index not in self._resident)
        if not self._options.reads_ahead:
            return
        soon = set(list(self._ahead)[: len(self._slots)])
        for slot in self._slots:
            if not slot.is_held and slot.index not in soon:
                self._read_next(slot)

    def fetch(self, index: int) -> dict[str, Tensor]:
        if index in self._resident:
            return self._resident[index]
        self._check()
        slot = self._slot_of.get(index) or self._claim(index)
        assert not slot.is_held, f"unit {index} is fetched twice"
        self._settle(slot)
        place = self._places[index]
        slot.is_held = True
        return place.views(slot.memory)

    def write_back(self, index: int) -> None:
        if index in self._resident:
            return
        slot, place = self._slot_of[index], self._places[index]
        assert self._queue is not None and slot.is_held
        slot.is_held = False
        self._check()
        place.num_stored = place.used(slot.memory)
        slot.write = self._queue.write(self._file, place.offset, slot.memory[: place.num_stored])
        self.bytes_written += place.num_stored
        if not self._options.writes_behind:
            self._settle(slot)
        self._move_on(slot)

    def release(self, index: int) -> None:
        if index in self._resident:
            return
        slot = self._slot_of[index]
        slot.is_held = False
        self._move_on(slot)

    def finish(self) -> None:
        self._check()
        self._ahead.clear()
        for slot in self._slots:
            self._settle(slot)

    def view(self, index: int) -> dict[str, Tensor]:
        if index in self._resident:
            return self._resident[index]
        self._check()
        self._forget(index)
        if self._file_view is None:
            self._file_view = FileView(self._file, self._file_bytes)
        self._viewed.add(index)
        return self._file_view.show(self._places[index])

    def _take_views_back(self) -> None:
        """The file is read and written directly again; what was viewed may be anything, so it counts as written."""
        if not self._viewed or self._file_view is None:
            return
        try:
            self._file_view.withdraw()
        except OffloadError as error:
            self._failure = error
            raise
        for index in self._viewed:
            self._places[index].num_stored = self._places[index].num_bytes
            self._forget(index)
        self._viewed.clear()

    def _forget(self, index: int) -> None:
        """No slot holds the unit any more."""
        slot = self._slot_of.pop(index, None)
        if slot is not None:
            assert not slot.is_held
            self._settle(slot)
            slot.index = None

    def take_waits(self) -> dict[str, float]:
        taken, self._waits = self._waits, dict.fromkeys(self._waits, 0.0)
        return taken

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._queue is not None:
            self._queue.close()
        self._file_view = None  # unmapped with its last tensor
        self._file.close()
        self._folder.close()
        if self._queue is None or not self._queue.is_stuck:
            for slot in self._slots:
                self._memory.free(slot.memory)
        for tensors in getattr(self, "_resident", {}).values():
            for tensor in tensors.values():
                self._memory.free(tensor)

    # -- slots -------------------------------------------------------------------------------------------------

    def _move_on(self, slot: _Slot) -> None:
        """The slot's unit is done with: it reads the next one, as soon as what it writes is written."""
        if self._ahead and slot.index == self._ahead[0]:
            self._ahead.popleft()
        if self._options.reads_ahead:
            self._read_next(slot)

    def _read_next(self, slot: _Slot) -> None:
        while self._ahead and self._ahead[0] in self._slot_of:
            self._ahead.popleft()
        if self._ahead:
            self._read(slot, self._ahead.popleft())

    def _read(self, slot: _Slot, index: int) -> None:
        assert self._queue is not None
        if slot.index is not None:
            del self._slot_of[slot.index]
        slot.index, self._slot_of[index] = index, slot
        place = self._places[index]
        slot.read = self._queue.read(self._file, place.offset, slot.memory[: place.num_stored], after=slot.write)
        self.bytes_read += place.num_stored

    def _claim(self, index: int) -> _Slot:
        """A slot for a unit that nobody announced: an idle one, else the one whose unit is needed last."""
        free = [slot for slot in self._slots if not slot.is_held]
        assert free, f"more than {len(self._slots)} units are fetched at a time"
        slot = next((slot for slot in free if slot.read is None), free[-1])
        self._settle(slot)
        self._read(slot, index)
        return slot

    def _settle(self, slot: _Slot) -> None:
        """Wait for what the slot writes and reads; then it holds all of its unit, zeros included."""
        if slot.write is not None:
            self._wait(slot.write, "disk_write")
            slot.write = None
        if slot.read is not None and slot.index is not None:
            self._wait(slot.read, "disk_read")
            slot.read = None
            place = self._places[slot.index]
            slot.memory[place.num_stored : place.num_bytes].zero_()

    def _wait(self, transfer: Transfer, cause: str) -> None:
        since = time.perf_counter()
        try:
            transfer.wait()
        except OffloadError as error:
            self._failure = error
            raise
        finally:
            self._waits[cause] += time.perf_counter() - since

    def _check(self) -> None:
        """Raise what has failed by now."""
        if self._failure is not None:
            raise OffloadError(**self._failure.fields()) from self._failure
        for slot in self._slots:
            if slot.write is not None and slot.write.is_done():
                self._wait(slot.write, "disk_write")
                slot.write = None
