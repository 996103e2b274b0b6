"""Limits of the container count, and too little is odd."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydz.cli.machine import cpu_limit, cpus, judge_disk, memory, memory_bytes, shared_memory

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1 kB\nMemAvailable:    8388608 kB\n"  # 16 and 8 GiB


def machine(tmp_path: Path, **files: str) -> Path:
    """A file system with these files; `__` in a name is a slash, `_D_` a dot."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        path = tmp_path / name.replace("__", "/").replace("_D_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 16, 8),
        ({"sys__fs__cgroup__memory_D_max": "max\n", "sys__fs__cgroup__memory_D_current": "5\n"}, 16, 8),
        ({"sys__fs__cgroup__memory_D_max": f"{4 * GIB}\n", "sys__fs__cgroup__memory_D_current": f"{GIB}\n"}, 4, 3),
        (
            {
                "sys__fs__cgroup__memory__memory_D_limit_in_bytes": f"{2 * GIB}\n",
                "sys__fs__cgroup__memory__memory_D_usage_in_bytes": f"{3 * GIB}\n",
            },
            2,
            0,
        ),
    ],
)
def test_memory_is_the_machines_or_the_containers_whichever_is_less(tmp_path, files, total, available):
    assert memory_bytes(machine(tmp_path, **files)) == (total * GIB, available * GIB)


def test_memory_that_is_nearly_full_is_odd(tmp_path):
    full = {
        "sys__fs__cgroup__memory_D_max": f"{100 * GIB // 10}",
        "sys__fs__cgroup__memory_D_current": f"{97 * GIB // 10}",
    }
    (found,) = memory(machine(tmp_path, **full))
    assert found.state == "odd"
    assert [finding.state for finding in memory(machine(tmp_path, sys__fs__cgroup__memory_D_current="0"))] == ["ok"]


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"sys__fs__cgroup__cpu_D_max": "max 100000\n"}, None),
        ({"sys__fs__cgroup__cpu_D_max": "150000 100000\n"}, 1.5),
        (
            {
                "sys__fs__cgroup__cpu__cpu_D_cfs_quota_us": "50000\n",
                "sys__fs__cgroup__cpu__cpu_D_cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {"sys__fs__cgroup__cpu__cpu_D_cfs_quota_us": "-1\n", "sys__fs__cgroup__cpu__cpu_D_cfs_period_us": "100000"},
            None,
        ),
    ],
)
def test_cpus_are_limited_by_the_container(tmp_path, files, limit):
    root = machine(tmp_path, **files)
    assert cpu_limit(root) == limit


def test_fewer_cpus_than_seen_are_odd_and_at_least_one_thread_is_advised(tmp_path):
    (found,) = cpus(machine(tmp_path, sys__fs__cgroup__cpu_D_max="50000 100000"))
    assert found.state == "odd"
    assert "take 1 together" in found.remedy


@pytest.mark.parametrize(
    ("total", "free", "state"),
    [(100 * GIB, 50 * GIB, "ok"), (100 * GIB, 9 * GIB, "odd"), (1000 * GIB, 40 * GIB, "odd")],
)
def test_a_disk_with_little_space_is_odd(total, free, state):
    assert judge_disk("disk", Path("/x"), total, free).state == state


@pytest.mark.parametrize(("total", "state"), [(64 << 20, "odd"), (2 * GIB, "ok")])
def test_a_containers_default_of_shared_memory_is_odd(tmp_path, monkeypatch, total, state):
    monkeypatch.setattr("raydz.cli.machine.shutil.disk_usage", lambda _: type("Usage", (), {"total": total}))
    assert shared_memory(tmp_path).state == state


def test_a_machine_without_shared_memory_is_broken(tmp_path):
    assert shared_memory(tmp_path / "shm").state == "broken"
