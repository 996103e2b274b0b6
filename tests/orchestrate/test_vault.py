"""Snapshots beyond their worker's life, without Ray: what a vault holds, what it copies, what gives way."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from raydz.orchestrate import copies as copies_module
from raydz.orchestrate.copies import Copies, next_node, parts_of
from raydz.orchestrate.place import Place, Seat
from raydz.orchestrate.vault import Vault
from raydz.storage.memory_slot import MemorySlot, new_memory

KEY = (2, 1)


def image(step: int, num_bytes: int = 1000) -> bytes:
    return bytes([step]) * num_bytes


def record(step: int, start: int = 0, num_bytes: int = 1000) -> dict:
    return {"step": step, "start": start, "bytes": num_bytes}


def put(vault: Vault, step: int, start: int = 0, key=KEY) -> None:
    data = np.frombuffer(image(step), np.uint8)
    for begin in (0, 400, 800):
        vault.put_part(key, (step, start), 1000, begin, data[begin : begin + 400])
    vault.commit(key, record(step, start))


@pytest.fixture
def memory():
    fds = [new_memory("test") for _ in range(2)]
    yield tuple(fds)
    for fd in fds:
        os.close(fd)


class Near:
    """An actor in this process."""

    def __init__(self, vault: Vault) -> None:
        self.vault = vault

    def __getattr__(self, name: str):
        return SimpleNamespace(remote=lambda *arguments: Answer(getattr(self.vault, name)(*arguments)))


class Answer:
    """What `ray.get` gives."""

    def __init__(self, value) -> None:
        self.value = value


@pytest.fixture
def no_ray(monkeypatch):
    def get(found, timeout=None):
        return [one.value for one in found] if isinstance(found, list) else found.value

    monkeypatch.setattr(copies_module.ray, "get", get)
    monkeypatch.setattr(copies_module.ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    monkeypatch.setattr(copies_module, "_PART_BYTES", 300)


def copies_of(memory, vaults, node="a") -> Copies:
    found = Copies(Seat(Place(1, 2, 0, 1), node, "host", memory))
    found.vaults = vaults
    return found


def test_the_newest_two_copies_are_kept_and_come_back_as_they_were() -> None:
    vault = Vault()
    for step in (3, 6, 9):
        put(vault, step)
    assert sorted(found["step"] for found in vault.records(KEY)) == [6, 9]
    assert vault.get_part(KEY, (9, 0), 100, 1000).tobytes() == image(9)[100:]
    assert vault.get_part(KEY, (3, 0), 0, 10) is None


def test_what_an_earlier_start_made_gives_way_first() -> None:
    vault = Vault()
    put(vault, 30), put(vault, 33), put(vault, 24, start=1), put(vault, 27, start=1)
    assert sorted((found["step"], found["start"]) for found in vault.records(KEY)) == [(24, 1), (27, 1)]


def test_a_copy_that_was_broken_off_does_not_count_and_leaves_the_other() -> None:
    vault = Vault()
    put(vault, 3), put(vault, 6)
    vault.put_part(KEY, (9, 0), 1000, 0, np.zeros(400, np.uint8))
    assert [found["step"] for found in vault.records(KEY)] == [6]


def test_held_memory_outlives_its_owner_and_the_owners_changes_are_seen(memory) -> None:
    vault = Vault()
    assert vault.hold(KEY, os.getpid(), memory)
    MemorySlot(memory[0]).put(record(4), memoryview(image(4)))
    assert vault.records(KEY) == [record(4)]
    pid = os.fork()
    if pid == 0:  # another worker, which ends
        own = tuple(new_memory("own") for _ in range(2))
        MemorySlot(own[1]).put(record(8), memoryview(image(8)))
        os._exit(0 if vault.hold(KEY, os.getpid(), own) and vault.records(KEY) == [record(8)] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_worker_that_is_gone_cannot_hand_its_memory_over(memory) -> None:
    assert not Vault().hold(KEY, 2**22 - 1, memory)


def test_another_number_of_ranks_takes_the_place_of_the_old_one() -> None:
    vault = Vault()
    put(vault, 3)
    put(vault, 6, key=(3, 1))
    assert vault.records(KEY) == [] and vault.records((3, 1)) == [record(6)]


def test_an_empty_memory_is_filled_from_whichever_vault_has_the_newest(memory, no_ray) -> None:
    here, there = Vault(), Vault()
    put(here, 3)
    put(there, 3), put(there, 6)
    copies_of(memory, {"a": Near(here), "b": Near(there)}).fetch_if_lost()
    slots = [MemorySlot(fd) for fd in memory]
    assert sorted(slot.record()["step"] for slot in slots) == [3, 6]
    for slot in slots:
        with slot.map() as found:
            assert found[:] == image(slot.record()["step"])


def test_memory_that_holds_something_is_left_alone(memory, no_ray) -> None:
    vault = Vault()
    put(vault, 9)
    MemorySlot(memory[0]).put(record(4), memoryview(image(4)))
    copies_of(memory, {"a": Near(vault)}).fetch_if_lost()
    assert [MemorySlot(fd).record() for fd in memory] == [record(4), None]


def test_a_snapshot_is_copied_to_the_next_node_and_not_to_the_own(memory, no_ray) -> None:
    here, there = Vault(), Vault()
    MemorySlot(memory[1]).put(record(4), memoryview(image(4)))
    sender = copies_of(memory, {"a": Near(here), "b": Near(there)})
    sender.send(4)
    sender._thread.join(10)
    assert here.records(KEY) == [] and there.records(KEY) == [record(4)]
    assert there.get_part(KEY, (4, 0), 0, 1000).tobytes() == image(4)


def test_alone_on_its_node_nothing_is_sent(memory, no_ray) -> None:
    sender = copies_of(memory, {"a": Near(Vault())})
    sender.send(4)
    assert sender._thread is None


@pytest.mark.parametrize(
    ("node", "nodes", "other"),
    [("a", ["a", "b", "c"], "b"), ("c", ["a", "b", "c"], "a"), ("a", ["a"], None), ("b", ["a"], "a"), ("a", [], None)],
)
def test_the_next_node_is_the_next_of_a_ring(node, nodes, other) -> None:
    assert next_node(node, nodes) == other


def test_parts_cover_an_image_once(monkeypatch) -> None:
    monkeypatch.setattr(copies_module, "_PART_BYTES", 10)
    assert parts_of(25) == [(0, 10), (10, 20), (20, 25)] and parts_of(0) == []
