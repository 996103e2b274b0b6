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
