"""Classes under DeepSpeed's names, so that tests can change its files without having it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Fields:
    """Enums are built from an argument, objects from a state without a call of `__init__`."""

    arguments = ()

    def __init__(self, *arguments, **fields) -> None:
        self.__dict__.update(fields)
        if arguments:
            self.arguments = arguments

    def __reduce__(self):
        return type(self), self.arguments, {k: v for k, v in self.__dict__.items() if k != "arguments"}


def _like(module: str, name: str) -> type:
    return type(name, (_Fields,), {"__module__": module, "__qualname__": name})


DynamicLossScaler = _like("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
_CLASSES = [
    DynamicLossScaler,
    _like("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    _like("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    _like("deepspeed.utils.tensor_fragment", "fragment_address"),
]


@contextmanager
def allowed() -> Iterator[None]:
    """Within, torch's weights-only loader makes objects of these classes, and they can be pickled."""
    names = [name for cls in _CLASSES for name in _and_parents(cls.__module__)]
    added = [name for name in names if name not in sys.modules]
    for name in added:
        sys.modules[name] = types.ModuleType(name)
    for cls in _CLASSES:
        setattr(sys.modules[cls.__module__], cls.__name__, cls)
    try:
        with torch.serialization.safe_globals([(cls, f"{cls.__module__}.{cls.__name__}") for cls in _CLASSES]):
            yield
    finally:
        for name in set(added):
            del sys.modules[name]


def _and_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
