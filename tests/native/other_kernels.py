"""A pytest plugin that puts another build of the kernels in the place of the installed one; see sanitize.sh.

`RAYDZ_TEST_KERNELS` is the path of that build's shared object.
"""

from __future__ import annotations

import importlib.util
import os
import sys

PATH = os.environ["RAYDZ_TEST_KERNELS"]


def pytest_load_initial_conftests() -> None:
    """Before any test module can have imported the installed one."""
    import raydz

    spec = importlib.util.spec_from_file_location("raydz._native", PATH)
    assert spec is not None and spec.loader is not None, PATH
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["raydz._native"] = raydz._native = module


def pytest_sessionstart() -> None:
    from raydz.ops import native

    found = native.describe()["path"]
    assert found == PATH, f"the tests would run on {found}"
