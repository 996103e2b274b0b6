"""Snapshots of a rank's state in host memory that outlives its process: what a restart in place begins from.

Neighbours: `train/snapshots.py` begins one every few steps; `orchestrate/supervisor.py` owns the memory. Each rank
keeps all that it holds, and loads that back by itself, without a store and without its peers. See "In memory" in
README.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raydz import log
from raydz.checkpoint.checksums import crc_function, default_algorithm
from raydz.checkpoint.data_file import FilePlan, plan_file
from raydz.checkpoint.manifest import ITEM_BYTES
from raydz.checkpoint.pieces import DTYPES, StatePiece
from raydz.checkpoint.snapshot import DeviceCopies, HostImage, keep_what_forward_changes
from raydz.errors import CheckpointError
from raydz.exits import JOIN_S, end_before_exit
from raydz.storage.memory_slot import IMAGE_OFFSET, MemorySlot

Moment = tuple[int, int]
"""Step, and number of the start of the run that made it."""
_SUM_BYTES = 16 << 20
_logger = log.get(__name__)


class MemorySnapshots:
    """The newest states of one rank, one a slot; the oldest gives way.

    Not collective: which step all ranks have is for the caller to find out.

    Args:
        start: number of this start of the run. What two starts made of one step may differ (a batch that was left out),
            so ranks may only go on from snapshots of one start.
        committed: is told the step of each snapshot that is whole, in the thread that made it.

    Attributes:
        blocked_s: how long training has stood still for snapshots since `take_blocked_s`.
        faults: snapshots that failed; the slots keep what they had, and the next one tries again.
    """

    def __init__(
        self, slots: Sequence[MemorySlot], rank: int, world_size: int, device: torch.device, *, start: int = 0,
        committed: Callable[[int], None] = lambda step: None,
    ) -> None:  # fmt: skip
        self._slots, self._rank, self._world_size, self._device = slots, rank, world_size, device
        self._start = start
        pinned = device.type == "cuda"
        self._images = [HostImage(pinned=pinned, fd=slot.fd, offset=IMAGE_OFFSET) for slot in slots]
        self._committed = committed
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self.blocked_s, self.faults = 0.0, 0

    @property
    def num_slots(self) -> int:
        """How many are kept."""
        return len(self._slots)

    def begin(self, step: int, pieces: Sequence[StatePiece], state: Mapping[str, Any]) -> None:
        """Take a snapshot of the state as it is now.

        Blocking: while the one before is under way. The state is copied behind the next forward and backward: whoever
        changes it calls `finish_copy` before.

        Args:
            pieces: all that this rank holds (`state_pieces(…, saving=False)`).
            state: JSON values that are not tensors.
        """
        started = time.perf_counter()
        self.wait()
        copies, kept = DeviceCopies(self._device), keep_what_forward_changes(pieces)
        record = {
            "step": step, "start": self._start, "rank": self._rank, "world_size": self._world_size,
            "state": json.dumps(dict(state)),
        }  # fmt: skip
        self._copied = copied = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(record, kept, copies, copied), name="raydz-snapshot", daemon=True
        )
        self._thread.start()
        end_before_exit(self._leave)
        self.blocked_s += time.perf_counter() - started

    def finish_copy(self) -> None:
        """Wait until the state may change."""
        if not self._copied.is_set():
            started = time.perf_counter()
            self._copied.wait()
            self.blocked_s += time.perf_counter() - started

    def take_blocked_s(self) -> float:
        """How long training has stood still for snapshots since the last call."""
        blocked_s, self.blocked_s = self.blocked_s, 0.0
        return blocked_s

    def wait(self) -> None:
        """Wait for the end of the snapshot under way."""
        if self._thread is not None:
            self._thread.join()

    def _leave(self) -> None:
        """The process ends."""
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def usable(self, pieces: Sequence[StatePiece]) -> list[Moment]:
        """Snapshots that are whole, sound, and of exactly this layout. Blocking: for a look at every byte."""
        plan, found = plan_file(pieces), []
        for slot in self._slots:
            record = slot.record()
            if record is None or (record["rank"], record["world_size"]) != (self._rank, self._world_size):
                continue
            fault = _fault(slot, record, plan)
            if fault is None:
                found.append(moment_of(record))
            else:
                _logger.warning("the snapshot of step %s in memory is not used: %s", record["step"], fault)
        return sorted(found)

    def load(self, moment: Moment, pieces: Sequence[StatePiece]) -> dict[str, Any]:
        """Fill the pieces from a moment that `usable` named; returns the state beside the tensors.

        Raises:
            CheckpointError: there is none of this moment.
        """
        for slot in self._slots:
            record = slot.record()
            if record is not None and moment_of(record) == moment:
                _hand_over(slot, plan_file(pieces))
                return json.loads(record["state"])
        raise CheckpointError("no snapshot of this moment in memory", got=moment, wanted="one that `usable` names")

    def forget_all_but(self, moment: Moment | None) -> None:
        """What comes after the moment that training goes on from did not happen."""
        for slot in self._slots:
            record = slot.record()
            if record is not None and moment_of(record) != moment:
                slot.forget()

    # -- in the snapshot's thread --------------------------------------------------------------------------------------

    def _run(
        self, record: dict[str, Any], pieces: Sequence[StatePiece], copies: DeviceCopies, copied: threading.Event
    ) -> None:  # fmt: skip
        try:
            plan = plan_file(pieces)
            index = self._oldest()
            slot, image = self._slots[index], self._images[index]
            slot.forget()
            image.reserve(plan.total_bytes)
            copies.run(plan, image)
            copied.set()
            algorithm = default_algorithm()
            sums = {"bytes": plan.total_bytes, "algorithm": algorithm, "crc": _sum(image.view, algorithm)}
            slot.commit({**record, **sums})
            self._committed(record["step"])
        except Exception as error:  # training goes on: the store has checkpoints
            self.faults += 1
            _logger.error("no snapshot of step %s in memory: %s", record["step"], error)
        finally:
            copied.set()

    def _oldest(self) -> int:
        moments = [(-1, -1) if (record := slot.record()) is None else moment_of(record) for slot in self._slots]
        return moments.index(min(moments))


def moment_of(record: Mapping[str, Any]) -> Moment:
    """Of a slot's record."""
    return int(record["step"]), int(record["start"])


def _sum(view: memoryview, algorithm: str) -> int:
    crc, total = crc_function(algorithm, "a snapshot in memory"), 0
    for start in range(0, len(view), _SUM_BYTES):
        total = crc(view[start : start + _SUM_BYTES], total)
    return total


def _fault(slot: MemorySlot, record: dict[str, Any], plan: FilePlan) -> str | None:
    """Why the image cannot be loaded into these pieces, or None."""
    if not record["bytes"] == slot.image_bytes() == plan.total_bytes:
        return "another layout"
    with slot.map() as image, memoryview(image) as view:
        if bytes(view[: len(plan.header)]) != plan.header:
            return "another layout"
        return None if _sum(view, record["algorithm"]) == record["crc"] else "its checksum does not fit"


@torch.no_grad()
def _hand_over(slot: MemorySlot, plan: FilePlan) -> None:
    image = slot.map()  # unmapped with the last tensor over it
    for piece, offset in zip(plan.pieces, plan.offsets, strict=True):
        numel = piece.stop - piece.start
        if numel:
            size = numel * ITEM_BYTES[piece.dtype]
            raw = torch.frombuffer(image, dtype=torch.uint8, count=size, offset=offset)
            piece.write(0, raw.view(DTYPES[piece.dtype]))
