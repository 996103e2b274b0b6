from __future__ import annotations

import importlib
import importlib.util
import logging

import pytest
import torch

from raydz.errors import NativeError
from raydz.ops import native
from raydz.version import __version__

installed = pytest.mark.skipif(
    importlib.util.find_spec("raydz._native") is None, reason="raydz was installed without its compiled kernels"
)


@pytest.fixture
def fresh(monkeypatch):
    """`load` as in a new process."""
    native.load.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    native.load.cache_clear()


@pytest.fixture
def warnings_logged():
    """Messages of the loader, whatever other tests did to raydz's handlers."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("raydz.ops.native")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def hide_kernels(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.native
def test_describe_names_the_kernels(isa):
    found = native.describe()
    assert found["isa"] == isa
    assert found["version"] == __version__
    assert found["path"].endswith(".so")


def test_missing_kernels_warn_once_and_name_the_remedy(fresh, warnings_logged):
    hide_kernels(fresh)
    assert native.load() is None
    assert native.load() is None
    assert len(warnings_logged) == 1
    assert "pip install" in warnings_logged[0]
    assert native.describe()["isa"] == "torch"


def test_missing_kernels_stop_who_requires_them(fresh):
    hide_kernels(fresh)
    with pytest.raises(NativeError, match="not installed"):
        native.require()


@pytest.mark.native
@installed
def test_kernels_of_another_version_are_refused(fresh):
    fresh.setattr(native, "__version__", "9.9.9")
    with pytest.raises(NativeError, match=r"wanted: 9\.9\.9"):
        native.load()


@pytest.mark.native
@installed
def test_kernels_that_do_not_load_are_an_error_not_a_fallback(fresh):
    def fail(name):
        raise ImportError("GLIBCXX_3.4.99 not found")

    fresh.setattr(importlib, "import_module", fail)
    with pytest.raises(NativeError, match="GLIBCXX"):
        native.load()


def test_tensors_elsewhere_get_the_reference():
    assert native.kernels_for(torch.zeros(1, device="meta")) is None
