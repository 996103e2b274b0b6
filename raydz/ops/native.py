"""Finds the compiled kernels, `raydz._native`, and says which ones they are. Layer 2.

Above: `adamw.py`, `rounding.py`, `reduction.py` ask `kernels_for` on each call. Below: `native/module.cpp`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType

import torch

from raydz import log
from raydz.errors import ConfigError, NativeError
from raydz.version import __version__

_REBUILD = "install raydz again with a C++17 compiler on the machine: pip install --force-reinstall --no-deps raydz"


@functools.cache
def load() -> ModuleType | None:
    """The compiled kernels, or None where raydz was installed without them; warns the first time it is None.

    Raises:
        NativeError: they are there but cannot be used (another version, or the file does not load).
    """
    if importlib.util.find_spec("raydz._native") is None:
        log.get(__name__).warning(
            "raydz was installed without its compiled kernels: optimizer steps on the CPU use torch, "
            "with the same results but several times slower. To have them, %s",
            _REBUILD,
        )
        return None
    return _checked_module()


def require() -> ModuleType:
    """The compiled kernels, for callers that have no reference to fall back on.

    Raises:
        NativeError: they are not installed or cannot be used.
    """
    module = load()
    if module is None:
        raise NativeError("the compiled kernels are not installed", where="raydz._native", remedy=_REBUILD)
    return module


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """The compiled kernels if they are there and can work on `tensor`'s device, else None: use the reference."""
    return load() if tensor.device.type == "cpu" else None


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled for the GPU; warns the first time where not, the references then run."""
    if importlib.util.find_spec("triton") is not None:
        return True
    log.get(__name__).warning(
        "triton is not installed: optimizer steps on the GPU use torch, with the same results but several times slower"
    )
    return False


def describe() -> dict[str, str | None]:
    """Which kernels run on the CPU: `isa` (`torch` for the references), `version` and `path` of the module."""
    module = load()
    if module is None:
        return {"isa": "torch", "version": None, "path": None}
    return {"isa": module.isa(), "version": module.__version__, "path": module.__file__}


def run_on(processors: Sequence[int]) -> None:
    """Run the kernels' threads, those of now and later ones, on these CPUs alone; callers only wait for them then.

    Raises:
        ConfigError: one of them is not a CPU that this process may use, or there are none.
    """
    usable = os.sched_getaffinity(0)
    module = load()
    if not processors or not usable.issuperset(processors) or (module and not module.set_pool_affinity([*processors])):
        raise ConfigError(
            "kernels cannot run on these CPUs", where="parallel.offload_affinity", got=list(processors),
            wanted=f"some of {sorted(usable)}", remedy="leave the key out to use all of them",
        )  # fmt: skip


def _checked_module() -> ModuleType:
    try:
        module = importlib.import_module("raydz._native")
    except ImportError as error:
        raise NativeError(
            "the compiled kernels do not load", where="raydz._native", got=error, remedy=_REBUILD
        ) from error
    if module.__version__ != __version__:
        raise NativeError(
            "the compiled kernels belong to another version of raydz",
            where=module.__file__,
            got=module.__version__,
            wanted=__version__,
            remedy=_REBUILD,
        )
    return module
