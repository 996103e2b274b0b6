from __future__ import annotations

import subprocess
import sys

import pytest

from raydz.tracking import memory

_MIB = 1 << 20


def test_a_freed_allocation_stays_in_the_peak_until_the_reset():
    if not memory.reset_host_peak():
        pytest.skip("this kernel does not permit a reset of the peak")
    before = memory.host_memory_peak_bytes()
    block = bytearray(b"x") * (200 * _MIB)
    del block
    peak = memory.host_memory_peak_bytes()
    assert 195 * _MIB < peak - before < 260 * _MIB
    memory.reset_peaks()
    assert memory.host_memory_peak_bytes() < peak - 150 * _MIB


def test_without_proc_the_peak_of_the_whole_life_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "none" / "none")
    assert memory.reset_host_peak() is False
    assert memory.host_memory_peak_bytes() > 10 * _MIB


def test_without_a_gpu_device_memory_is_host_memory_and_torch_is_not_imported():
    code = (
        "import sys; from raydz.tracking import read_peaks; p = read_peaks();"
        "assert p['memory_peak_bytes'] == p['host_memory_peak_bytes'] > 1 << 20, p;"
        "assert not {'torch', 'mlflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
