"""A record in shared memory is whole or not there; the memory outlives the process that wrote it, and nothing else."""

from __future__ import annotations

import os
import signal

import pytest

from raydz.errors import StorageError
from raydz.storage.memory_slot import IMAGE_OFFSET, MemorySlot, new_memory


@pytest.fixture
def slot():
    fd = new_memory("test")
    yield MemorySlot(fd)
    os.close(fd)


def test_a_new_slot_holds_nothing(slot) -> None:
    assert slot.record() is None and slot.image_bytes() == 0


def test_what_is_put_is_there(slot) -> None:
    slot.put({"step": 3, "text": "ä" * 100}, memoryview(b"abcdef"))
    assert slot.record() == {"step": 3, "text": "ä" * 100}
    with slot.map() as image:
        assert image[:] == b"abcdef"


def test_a_forgotten_record_is_gone_and_the_image_is_not(slot) -> None:
    slot.put({"step": 3}, memoryview(b"abc"))
    slot.forget()
    assert slot.record() is None and slot.image_bytes() == 3


@pytest.mark.parametrize("byte", [0, 9, 14, 20])
def test_a_record_that_is_torn_or_damaged_is_none(slot, byte: int) -> None:
    slot.put({"step": 3}, memoryview(b"abc"))
    value = os.pread(slot.fd, 1, byte)[0]
    os.pwrite(slot.fd, bytes([value ^ 1]), byte)
    assert slot.record() is None


def test_a_record_that_does_not_fit_is_refused_and_nothing_is_committed(slot) -> None:
    with pytest.raises(StorageError, match="too long"):
        slot.put({"text": "x" * IMAGE_OFFSET}, memoryview(b"abc"))
    assert slot.record() is None


def test_it_outlives_the_process_that_wrote_it(slot) -> None:
    pid = os.fork()
    if pid == 0:
        slot.put({"step": 9}, memoryview(b"from the child"))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert slot.record() == {"step": 9}


def test_no_file_system_knows_its_name(slot) -> None:
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{slot.fd}")
