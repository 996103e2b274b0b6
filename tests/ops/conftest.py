"""Fixtures of the kernel tests: every instruction set of this machine in turn, and inputs at awkward places."""

from __future__ import annotations

import pytest

from raydz.ops import native

ISAS = () if (module := native.load()) is None else tuple(module.available_isas())


@pytest.fixture(params=ISAS or ("none",))
def isa(request):
    """Run the test with the compiled kernels of this instruction set."""
    if not ISAS:
        pytest.skip("raydz was installed without its compiled kernels")
    kernels = native.require()
    before = kernels.isa()
    kernels.select_isa(request.param)
    yield request.param
    kernels.select_isa(before)


@pytest.fixture
def without_kernels(monkeypatch):
    """Run the test as on a machine that has no compiled kernels."""
    for module in ("adamw", "elementwise", "rounding", "reduction"):
        monkeypatch.setattr(f"raydz.ops.{module}.kernels_for", lambda tensor: None)
