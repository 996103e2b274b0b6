"""A supervisor's dealings with vaults: hand its rank's memory over, copy each snapshot to another node, fetch it back.

Neighbours: `vault.py` is at the other end; `supervisor.py` calls these. Everything here may fail without harm: the
store has checkpoints. See README.md, "Copies in other nodes' memory".
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray

from raydz import log
from raydz.orchestrate.place import Seat
from raydz.orchestrate.vault import Moment, moment_of
from raydz.storage.memory_slot import MemorySlot

_PART_BYTES = 64 << 20
_PARTS_AHEAD = 2
_ANSWER_S = 60.0
_logger = log.get(__name__)


def next_node(node_id: str, node_ids: Sequence[str]) -> str | None:
    """The node after this one, in a ring of all; None if there is no other. Pure."""
    ring = sorted({*node_ids, node_id})
    other = ring[(ring.index(node_id) + 1) % len(ring)]
    return None if other == node_id else other


def parts_of(num_bytes: int) -> list[tuple[int, int]]:
    """Start and stop of each part that travels at once: a node's object store need not hold a whole image. Pure."""
    return [(start, min(start + _PART_BYTES, num_bytes)) for start in range(0, num_bytes, _PART_BYTES)]


class Copies:
    """Of one worker.

    Attributes:
        vaults: by node; the driver says which there are.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat, self._key = seat, (seat.place.world_size, seat.place.rank)
        self._slots = [MemorySlot(fd) for fd in seat.memory]
        self.vaults: Mapping[str, Any] = {}
        self._thread: threading.Thread | None = None

    def hold(self) -> None:
        """Let the vault of this node hold the memory, too, so that it outlives this worker."""
        vault = self.vaults.get(self._seat.node_id)
        if vault is not None and self._slots:
            vault.hold.remote(self._key, os.getpid(), self._seat.memory)

    def send(self, step: int) -> None:
        """Copy a snapshot to the next node, in a thread; left out while one is on its way."""
        other = next_node(self._seat.node_id, list(self.vaults))
        if other is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._send, args=(self.vaults[other], step), daemon=True)
        self._thread.start()

    def fetch_if_lost(self) -> None:
        """Fill the memory from vaults where it holds nothing. Blocking: until it is there."""
        if not self._slots or not self.vaults or any(slot.record() is not None for slot in self._slots):
            return
        try:
            found = self._find()
            for slot, moment in zip(self._slots, sorted(found, reverse=True), strict=False):
                self._fetch(slot, *found[moment])
                _logger.info("the snapshot of step %d comes from a vault", moment[0])
        except Exception as error:  # the store has checkpoints
            _logger.warning("no snapshot was fetched from other memory: %s: %s", type(error).__name__, error)

    def _find(self) -> dict[Moment, tuple[Any, dict[str, Any]]]:
        """By moment: a vault that has it, and the record."""
        asked = {vault.records.remote(self._key): vault for vault in self.vaults.values()}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
        found: dict[Moment, tuple[Any, dict[str, Any]]] = {}
        for ref in ready:
            try:
                records = ray.get(ref)
            except Exception as error:  # its node has gone
                _logger.info("a vault does not answer: %s", type(error).__name__)
                continue
            found |= {moment_of(record): (asked[ref], record) for record in records}
        return found

    def _fetch(self, slot: MemorySlot, vault: Any, record: dict[str, Any]) -> None:
        image = np.empty(record["bytes"], np.uint8)
        for start, stop in parts_of(image.nbytes):
            part = ray.get(vault.get_part.remote(self._key, moment_of(record), start, stop), timeout=_ANSWER_S)
            if part is None:
                return
            image[start:stop] = part
        slot.put(record, image.data)

    def _send(self, vault: Any, step: int) -> None:
        try:
            slot, record = next(
                (slot, record) for slot in self._slots if (record := slot.record()) and record["step"] == step
            )
            under_way: list[Any] = []
            with slot.map() as image:
                for start, stop in parts_of(len(image)):
                    part = np.frombuffer(image[start:stop], np.uint8)
                    under_way.append(vault.put_part.remote(self._key, moment_of(record), len(image), start, part))
                    if len(under_way) > _PARTS_AHEAD:
                        ray.get(under_way.pop(0), timeout=_ANSWER_S)
            ray.get([*under_way, vault.commit.remote(self._key, record)], timeout=_ANSWER_S)
        except StopIteration:  # it has given way already
            return
        except Exception as error:  # that node is busy or gone
            _logger.info("the snapshot of step %d was not copied: %s", step, type(error).__name__)
