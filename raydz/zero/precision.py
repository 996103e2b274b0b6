"""Which dtype each parameter computes in, and the casts at the border of modules that are an exception.

Neighbours: `sharded.py` asks `PrecisionPlan` for every parameter and forms flat groups by the answer; `hooks.py`
installs the casts; `engine.py` casts what enters the model. See "Precision" in README.md.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from raydz.config import EngineConfig
from raydz.errors import ConfigError
from raydz.zero.units import ParameterSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the configuration's names."""
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PrecisionPlan:
    """Dtypes of a model.

    Args:
        compute_dtype: of everything that is no exception.
        fp32_modules: outermost modules by name whose parameters, inputs and results inside are fp32.
        keeps_rest: beside trained bf16 weights, what they lack to fp32 masters.
        state_dtype: of optimizer states.
    """

    compute_dtype: torch.dtype
    fp32_modules: tuple[str, ...] = ()
    keeps_rest: bool = True
    state_dtype: torch.dtype = torch.float32

    @classmethod
    def from_config(cls, model: nn.Module, config: EngineConfig) -> PrecisionPlan:
        """What `bf16`, `fp16` and `parallel.fp32_modules` say. Raises: as `of`."""
        plan = cls.of(model, DTYPES[config.compute_dtype], config.parallel.fp32_modules or ())
        return dataclasses.replace(
            plan,
            keeps_rest=not config.bf16.bf16_master_weights_and_grads,
            state_dtype=torch.bfloat16 if config.bf16.bf16_optimizer_states else torch.float32,
        )

    @classmethod
    def of(cls, model: nn.Module, compute_dtype: torch.dtype, patterns: Sequence[str]) -> PrecisionPlan:
        """Find the modules that `patterns` (fnmatch, of module names) make exceptions.

        Raises:
            ConfigError: a pattern matches nothing.
        """
        chosen: list[str] = []
        names = [name for name, _ in model.named_modules() if name]
        for pattern in patterns:
            matching = [name for name in names if fnmatchcase(name, pattern)]
            if not matching:
                raise ConfigError(
                    "no module has this name", where="parallel.fp32_modules", got=pattern,
                    wanted="a pattern of module names", remedy="for example " + ", ".join(names[:3]),
                )  # fmt: skip
            chosen += matching
        outermost = [n for n in names if n in chosen and not any(n.startswith(other + ".") for other in chosen)]
        return cls(compute_dtype, tuple(outermost))

    def dtype_of(self, spec: ParameterSpec) -> torch.dtype:
        """fp32 in an exception. Else trained parameters, and frozen fp32 ones, compute in `compute_dtype`; frozen ones
        of another dtype (a LoRA base, quantised weights) keep it.

        Raises:
            ConfigError: a tied parameter lies both inside and outside of the exceptions.
        """
        inside = [self._is_fp32(name) for name in (spec.name, *spec.aliases)]
        if any(inside) and not all(inside):
            raise ConfigError(
                "a tied parameter would need two dtypes", where="parallel.fp32_modules",
                got=f"{spec.name}, also registered as {', '.join(spec.aliases)}",
                remedy="name all the modules that share it, or none",
            )  # fmt: skip
        if all(inside) and spec.parameter.is_floating_point():
            return torch.float32
        is_own = not spec.parameter.requires_grad and spec.parameter.dtype != torch.float32
        return spec.parameter.dtype if is_own else self.compute_dtype

    def may_round(self, dtype: torch.dtype) -> bool:
        """Whether what a group of `dtype` sends may be rounded: it is no fp32 exception and no table of integers."""
        return dtype in (*_HALVES, torch.float32) and (dtype in _HALVES or self.compute_dtype == torch.float32)

    def _is_fp32(self, parameter: str) -> bool:
        return any(parameter.startswith(module + ".") for module in self.fp32_modules)

    def install_casts(self, model: nn.Module) -> list:
        """Hooks that cast 16-bit inputs of the exceptions to fp32 and fp32 outputs back; handles with `remove()`."""
        if self.compute_dtype not in _HALVES:
            return []

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return map_tensors((args, kwargs), lambda t: t.float() if t.dtype in _HALVES else t)

        def leave(module: nn.Module, args: tuple, output: Any) -> Any:
            return map_tensors(output, lambda t: t.to(self.compute_dtype) if t.dtype == torch.float32 else t)

        handles: list = []
        for name in self.fp32_modules:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        return handles


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nested tuples, lists, mappings and dataclasses (Hugging Face's outputs are both), tensors replaced.

    Containers are copied, never changed; other values are passed on.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        same = copy.copy(value)
        for key in value:
            same[key] = map_tensors(value[key], function)
        return same
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for entry in dataclasses.fields(value):
            object.__setattr__(clone, entry.name, map_tensors(getattr(value, entry.name), function))
        return clone
    return value
