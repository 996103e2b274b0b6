"""The compiled module itself: what it refuses, so that no call from Python can write outside a buffer."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from raydz.ops import native

pytestmark = pytest.mark.native


@pytest.fixture
def kernels():
    if native.load() is None:
        pytest.skip("raydz was installed without its compiled kernels")
    return native.require()


def adamw(kernels, *, scalars=(1.0,) * 10, low=None, out=None, **buffers):
    zeros = {name: torch.zeros(8) for name in ("master", "grad", "exp_avg", "exp_avg_sq")}
    return kernels.adamw(**{**zeros, **buffers}, low=low, out=out, scalars=scalars, decoupled=True)


@pytest.mark.parametrize("name", ["grad", "exp_avg", "exp_avg_sq", "out"])
@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (torch.zeros(7), "another number of elements"),
        (torch.zeros(16)[::2], "not contiguous"),
        (torch.zeros(8, dtype=torch.int16), "wrong dtype"),
        (torch.zeros(8, dtype=torch.float64), "not fp32"),
    ],
    ids=["length", "stride", "int16", "fp64"],
)
def test_buffers_that_do_not_fit_are_refused_by_name(kernels, name, buffer, why):
    with pytest.raises(ValueError, match=f"{name} .*{why}"):
        adamw(kernels, **{name: buffer})


def test_a_remainder_asks_for_a_bf16_master(kernels):
    with pytest.raises(ValueError, match="master has the wrong dtype"):
        adamw(kernels, low=torch.zeros(8, dtype=torch.int16))


def test_scalars_are_counted(kernels):
    with pytest.raises(ValueError, match="scalars"):
        adamw(kernels, scalars=(1.0,) * 9)


def test_rows_must_be_a_matrix_of_contiguous_rows(kernels):
    for rows in (torch.zeros(4), torch.zeros(0, 4), torch.zeros(4, 4).t(), torch.zeros(2, 5)):
        with pytest.raises(ValueError, match=r"raydz\._native: (rows|out)"):
            kernels.sum_rows(rows, torch.zeros(4), False, 1)


def test_an_unknown_instruction_set_is_refused_and_changes_nothing(kernels):
    before = kernels.isa()
    with pytest.raises(ValueError, match="mmx"):
        kernels.select_isa("mmx")
    assert kernels.isa() == before


def test_results_are_written_through_views_of_bf16_tensors(kernels):
    storage = torch.zeros(9, dtype=torch.bfloat16)
    kernels.round(torch.full((8,), 1.5), storage[1:], 1)
    assert storage.tolist() == [0.0] + [1.5] * 8


def test_other_threads_run_while_a_kernel_works(kernels):
    """Without the release of the GIL the clock stands still for the whole call."""
    seen, stop = [], threading.Event()

    def watch():
        while not stop.wait(0.001):
            seen.append(time.perf_counter())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    kernels.sum_rows(torch.zeros(8192).expand(300_000, -1), torch.zeros(8192), False, 1)
    taken = time.perf_counter() - start
    stop.set()
    watcher.join()
    assert any(0.25 * taken < moment - start < 0.75 * taken for moment in seen)
