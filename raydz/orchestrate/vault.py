"""Snapshots of ranks beyond the life of their workers: on the rank's node by holding its memory, on another as a copy.

Neighbours: the driver makes one `Vault` a node (`Vaults`); supervisors hand their memory over and fetch from them
(`copies.py`). Free of torch. See README.md, "Copies in other nodes' memory".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydz import log
from raydz.storage.memory_slot import IMAGE_OFFSET, MemorySlot, new_memory

NUM_SLOTS = 2
"""The newest snapshot may be whole on some ranks only; then the one before is."""
_logger = log.get(__name__)
Key = tuple[int, int]
"""World size and rank."""
Moment = tuple[int, int]
"""Step, and number of the start of the run that made it."""


class Vault:
    """An actor; ends with the driver, and what it holds with it.

    Memory: `NUM_SLOTS` snapshots of each of its node's ranks, which are theirs, and of each of the node before.
    """

    def __init__(self) -> None:
        self._held: dict[Key, list[MemorySlot]] = {}
        self._copied: dict[Key, list[MemorySlot]] = {}
        self._writing: dict[tuple[Key, Moment], MemorySlot] = {}

    def hold(self, key: Key, pid: int, fds: tuple[int, ...]) -> bool:
        """Hold the memory of a worker of this node; False where this system does not let it.

        In place of what it held for that rank, and for another number of ranks.
        """
        self._forget_other_sizes(key)
        try:
            slots = [MemorySlot(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)) for fd in fds]
        except OSError as error:
            _logger.warning("the memory of rank %d is lost with its worker: %s", key[1], error)
            return False
        _close(self._held.pop(key, []))
        self._held[key] = slots
        return True

    def put_part(self, key: Key, moment: Moment, num_bytes: int, start: int, part: np.ndarray) -> None:
        """Take bytes from `start` on of the image of a moment; the oldest copy of that rank gives way."""
        self._forget_other_sizes(key)
        if key not in self._copied:
            self._copied[key] = [MemorySlot(new_memory(f"raydz-copy-{key[1]}")) for _ in range(NUM_SLOTS)]
        slot = self._writing.get((key, moment))
        if slot is None:
            slot = min(self._copied[key], key=_age)
            slot.forget()
            os.ftruncate(slot.fd, IMAGE_OFFSET + num_bytes)
            self._writing = {(key, moment): slot} | {k: s for k, s in self._writing.items() if s is not slot}
        with slot.map() as image:
            image[start : start + part.nbytes] = part.data

    def commit(self, key: Key, record: dict[str, Any]) -> None:
        """All parts of a moment have come."""
        slot = self._writing.pop((key, moment_of(record)), None)
        if slot is not None:
            slot.commit(record)

    def records(self, key: Key) -> list[dict[str, Any]]:
        """Of the snapshots that are whole, of one rank."""
        return [record for slot in self._slots(key) if (record := slot.record()) is not None]

    def get_part(self, key: Key, moment: Moment, start: int, stop: int) -> np.ndarray | None:
        """Bytes of the image of a moment; None where it has given way meanwhile."""
        for slot in self._slots(key):
            if moment_of(slot.record()) == moment:
                with slot.map() as image:
                    return np.frombuffer(image[start:stop], np.uint8)
        return None

    def _slots(self, key: Key) -> list[MemorySlot]:
        return [*self._held.get(key, []), *self._copied.get(key, [])]

    def _forget_other_sizes(self, key: Key) -> None:
        for kept in (self._held, self._copied):
            for other in [other for other in kept if other[0] != key[0]]:
                _close(kept.pop(other))


def _close(slots: Iterable[MemorySlot]) -> None:
    for slot in slots:
        os.close(slot.fd)


def moment_of(record: Mapping[str, Any] | None) -> Moment:
    """Of a slot's record, or before all."""
    return (-1, -1) if record is None else (int(record["step"]), int(record["start"]))


def _age(slot: MemorySlot) -> Moment:
    """The smallest gives way: what an earlier start of the run made comes before, whatever its step."""
    step, start = moment_of(slot.record())
    return start, step


class Vaults:
    """The driver's: one vault a node, over all attempts of a run."""

    def __init__(self) -> None:
        self._vaults: dict[str, Any] = {}

    def on(self, node_ids: Iterable[str]) -> dict[str, Any]:
        """The vaults that live, those of these nodes among them, by node."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        self._vaults = {node: vault for node, vault in self._vaults.items() if node in alive}
        for node_id in sorted(set(node_ids) & alive - set(self._vaults)):
            there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            self._vaults[node_id] = ray.remote(num_cpus=0)(Vault).options(scheduling_strategy=there).remote()
        return dict(self._vaults)

    def close(self) -> None:
        """End them; nothing is left in any node's memory."""
        for vault in self._vaults.values():
            with suppress(Exception):  # of a node that has gone
                ray.kill(vault)
        self._vaults = {}
