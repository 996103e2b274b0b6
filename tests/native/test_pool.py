"""The kernels' threads: kept between calls, shared by callers, and begun anew after a fork."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raydz.ops import native, sum_squares

pytestmark = pytest.mark.native
NUMEL = 5 * 16 * 4096 + 7  # five threads' worth


@pytest.fixture
def kernels():
    if native.load() is None:
        pytest.skip("raydz was installed without its compiled kernels")
    return native.require()


def test_threads_are_kept_and_counted_by_the_largest_call(kernels):
    values = torch.ones(NUMEL)
    sum_squares(values, threads=4)
    kept = kernels.num_pool_threads()
    assert kept >= 3  # the caller is the fourth
    for threads in (2, 4, 3, 1):
        assert sum_squares(values, threads=threads) == NUMEL
    assert kernels.num_pool_threads() == kept


def test_a_short_call_starts_no_thread(kernels):
    kept = kernels.num_pool_threads()
    assert sum_squares(torch.ones(1000), threads=kept + 100) == 1000
    assert kernels.num_pool_threads() == kept


def test_callers_share_the_pool_and_get_their_own_results(kernels):
    inputs = [torch.full((NUMEL + 4096 * n,), float(n)) for n in range(6)]
    with ThreadPoolExecutor(6) as callers:
        for _ in range(10):
            found = list(callers.map(lambda values: sum_squares(values, threads=4), inputs))
            assert found == [n * n * float(NUMEL + 4096 * n) for n in range(6)]


FORK = """
import os, sys, torch
from raydz.ops import native, sum_squares
values = torch.ones({numel})
assert sum_squares(values, threads=3) == {numel}
child = os.fork()
if child == 0:
    before = native.require().num_pool_threads()
    os._exit(0 if (before, sum_squares(values, threads=3)) == (0, {numel}) else 3)
assert sum_squares(values, threads=3) == {numel}
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own(kernels):
    """Without them it would wait for its parent's for ever."""
    run = subprocess.run([sys.executable, "-c", FORK.format(numel=NUMEL)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


ALONE = """
import time, torch
from raydz.ops import native
import os
native.run_on(sorted(os.sched_getaffinity(0))[:1])
rows, out = torch.ones(64 * 16 * 4096).expand(100, -1), torch.zeros(64 * 16 * 4096)
start = time.thread_time()
native.require().sum_rows(rows, out, False, 2)
own, whole = time.thread_time() - start, time.process_time()
assert out.eq(100.0).all()
assert own < 0.02, (own, whole)
"""


def test_a_caller_leaves_the_work_to_threads_that_were_given_processors(kernels):
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


COUNTED = """
import torch
from pathlib import Path
from raydz.ops import native, sum_squares

def taken():
    tasks = Path("/proc/self/task").iterdir()
    return {{task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}}

def busy_threads(threads):
    before = taken()
    native.require().sum_rows(rows, out, False, threads)
    return sum(1 for task, ns in taken().items() if ns - before.get(task, 0) > 3_000_000)

torch.set_num_threads(1)
rows, out = torch.ones(64 * 16 * 4096).expand(300, -1), torch.zeros(64 * 16 * 4096)
sum_squares(torch.ones({numel} * 2), threads=6)
assert native.require().num_pool_threads() >= 5
for threads in (1, 2):
    busy = busy_threads(threads)
    assert 1 <= busy <= threads, (busy, threads)
    assert out.eq(300.0).all()
"""


def test_a_call_takes_no_more_threads_than_it_asked_for(kernels):
    """Though it has more chunks than that, and the pool more threads; by the system's account of each thread, in a
    process of its own, where nothing else computes."""
    source = COUNTED.format(numel=NUMEL)
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


PINNED = """
import os, sys, torch
from pathlib import Path
from raydz.ops import native, sum_squares
from raydz.errors import ConfigError

def tasks():
    return {{t.name for t in Path("/proc/self/task").iterdir()}}

values, before = torch.ones({numel}), tasks()
sum_squares(values, threads=2)
chosen = sorted(os.sched_getaffinity(0))[-1:]
native.run_on(chosen)
sum_squares(values, threads=4)
pool = tasks() - before
assert len(pool) == 4, pool
assert all(sorted(os.sched_getaffinity(int(task))) == chosen for task in pool), pool
assert len(os.sched_getaffinity(0)) > 0 and sum_squares(values, threads=4) == {numel}
for wrong in ([1023], []):
    try:
        native.run_on(wrong)
    except ConfigError as error:
        assert "parallel.offload_affinity" in str(error), error
    else:
        sys.exit(4)
"""


def test_the_pool_runs_on_the_processors_that_it_is_given(kernels):
    """Threads that are there and threads that come later; the caller's own stays where it is, and only waits."""
    run = subprocess.run([sys.executable, "-c", PINNED.format(numel=NUMEL)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
