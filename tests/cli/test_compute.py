"""No GPU is fine where there is none; one that torch cannot use is not."""

from __future__ import annotations

import pytest

from raydz.cli.compute import attention, judge_backends, judge_gpus, kernels, threads
from raydz.ops import native


@pytest.mark.parametrize(
    ("devices", "cuda", "has_driver", "visible", "state", "said"),
    [
        ([], None, False, None, "absent", "none"),
        (["H100 (80.0 GiB)"] * 2, "13.0", True, None, "ok", "2 x H100 (80.0 GiB), CUDA 13.0"),
        ([], None, True, None, "odd", "CPU build"),
        ([], "13.0", True, "", "odd", "CUDA_VISIBLE_DEVICES"),
        ([], "13.0", True, None, "odd", "no GPU"),
        ([], "13.0", False, None, "absent", "none"),
    ],
)
def test_a_gpu_that_torch_cannot_see_is_odd(devices, cuda, has_driver, visible, state, said):
    found = judge_gpus(devices, cuda, has_driver, visible)
    assert found.state == state
    assert said in found.detail


@pytest.mark.parametrize(
    ("names", "num_gpus", "state"),
    [
        (["gloo"], 0, "ok"),
        (["gloo"], 1, "broken"),
        (["gloo", "nccl"], 8, "ok"),
        (["nccl"], 1, "broken"),
        ([], 0, "broken"),
    ],
)
def test_gpus_need_nccl_and_every_machine_gloo(names, num_gpus, state):
    assert judge_backends(names, num_gpus).state == state


def test_missing_kernels_are_odd_and_say_how_to_get_them(monkeypatch):
    monkeypatch.setattr(native, "describe", lambda: {"isa": "torch", "version": None, "path": None})
    (found,) = kernels()
    assert found.state == "odd"
    assert "compiler" in found.remedy


def test_kernels_name_their_instruction_set(monkeypatch):
    monkeypatch.setattr(native, "describe", lambda: {"isa": "avx2", "version": "0.1.0", "path": "/x.so"})
    (found,) = kernels()
    assert (found.state, found.detail) == ("ok", "avx2, version 0.1.0")


def test_attention_kernels_are_those_that_run_here():
    (found,) = attention()
    assert (found.state, found.detail) == ("ok", "on cpu: bf16 flash (cpu); fp32 flash (cpu)")


def test_threads_that_the_environment_sets_are_named(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (found,) = threads()
    assert "OMP_NUM_THREADS=1" in found.detail
