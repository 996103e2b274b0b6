"""Host memory: exact, aligned, budgeted. Oracle for what is really held: the kernel's own record of this process."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from raydz.errors import ConfigError, OffloadError
from raydz.offload.memory import KEY, PAGE, HostMemory, host_budget

MIB = 1 << 20


def resident_bytes() -> int:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.fixture
def memory():
    made = HostMemory(64 * MIB)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("numel", [1, 1000, 2049, 3 * MIB // 4 + 5])
def test_sizes_are_exact_to_a_page_and_addresses_aligned(memory, numel, dtype):
    tensor = memory.empty(numel, dtype)
    assert tensor.shape == (numel,) and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.data_ptr() % PAGE == 0
    assert 0 <= memory.bytes_held - numel * dtype.itemsize < PAGE
    assert not tensor.any()
    tensor.fill_(3)
    assert tensor[-1] == 3


def test_an_empty_buffer_holds_nothing(memory):
    assert memory.empty(0, torch.float32).shape == (0,)
    assert memory.bytes_held == 0


def test_memory_is_the_systems_again_after_free_even_where_a_view_lingers(memory):
    before = resident_bytes()
    tensor = memory.empty(8 * MIB, torch.float32)
    tensor.fill_(1.0)
    view = tensor[5:]
    assert resident_bytes() - before > 30 * MIB
    memory.free(tensor)
    assert resident_bytes() - before < 8 * MIB
    assert memory.bytes_held == 0
    assert not view.any()
    memory.free(tensor)
    assert memory.bytes_held == 0


def test_the_last_tensor_gives_the_memory_back(memory):
    before = resident_bytes()
    tensor = memory.empty(8 * MIB, torch.float32)
    view = tensor.fill_(1.0).view(torch.int32)[3:9]
    del tensor
    gc.collect()
    assert memory.bytes_held == 32 * MIB and view[0] == 0x3F800000
    del view
    gc.collect()
    assert memory.bytes_held == 0
    assert resident_bytes() - before < 8 * MIB


def test_buffers_of_an_error_are_given_back(memory):
    def fails():
        kept = memory.empty(MIB, torch.float32)
        raise RuntimeError(f"after {kept.numel()}")

    with pytest.raises(RuntimeError):
        fails()
    gc.collect()
    assert memory.bytes_held == 0


def test_a_thousand_buffers_come_and_go(memory):
    """More than the budget in all; many would also be more mappings than Linux gives a process, were they kept."""
    for number in range(1000):
        assert not memory.empty(MIB, torch.float32)[number].item()
    gc.collect()
    assert memory.bytes_held == 0


def test_a_foreign_tensor_is_left_alone(memory):
    other = HostMemory(MIB)
    tensor = other.empty(10, torch.float32)
    memory.free(tensor.fill_(2.0))
    memory.free(torch.ones(4))
    assert tensor.eq(2.0).all() and other.bytes_held == PAGE


def test_the_budget_refuses_and_says_what_to_change(memory):
    kept = memory.empty(12 * MIB, torch.float32)
    with pytest.raises(OffloadError) as caught:
        memory.empty(4 * MIB + 1, torch.float32, "the second moments")
    said = str(caught.value)
    assert caught.value.where == KEY
    for part in (
        "the second moments",
        "16.0 MiB asked, 48.0 MiB held",
        "at most 64.0 MiB",
        "available of",
        "raise " + KEY,
    ):
        assert part in said
    assert memory.bytes_held == 48 * MIB
    memory.free(kept)
    assert memory.empty(4 * MIB + 1, torch.float32).numel() == 4 * MIB + 1


def test_the_budget_holds_under_many_threads():
    memory, kept, refused = HostMemory(100 * PAGE), [], []

    def take():
        for _ in range(50):
            try:
                kept.append(memory.empty(1024, torch.float32))
            except OffloadError:
                refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert (len(kept), len(refused), memory.bytes_held) == (100, 100, 100 * PAGE)
    assert len({tensor.data_ptr() for tensor in kept}) == 100


def test_what_the_system_refuses_is_named():
    with pytest.raises(OffloadError) as caught:
        HostMemory(1 << 62).empty(1 << 56, torch.uint8)
    assert "Cannot allocate memory" in str(caught.value) and "ulimit -l" in str(caught.value)


def test_the_budget_is_a_nodes_and_its_ranks_share_it(monkeypatch):
    monkeypatch.setattr("raydz.offload.memory.memory_bytes", lambda: (100 << 30, 40 << 30))
    assert host_budget(None) == int(0.9 * (40 << 30))
    assert host_budget(0.5, 4) == 5 << 30
    assert host_budget(1.0, 2) == 20 << 30
    assert host_budget("48GiB", 4) == 12 << 30
    assert host_budget(8_000_000, 8) == 1_000_000
    with pytest.raises(ConfigError):
        host_budget("a lot")


EXIT = """
import torch
from raydz.offload.memory import HostMemory
memory = HostMemory(1 << 30)
tensors = [memory.empty(1 << 20, torch.float32).fill_(1.0) for _ in range(8)]
views = [tensor[7:] for tensor in tensors]
memory.free(tensors[3])
"""


def test_a_process_ends_cleanly_with_buffers_held():
    run = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and not run.stderr, run.stderr
