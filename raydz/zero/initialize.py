"""Where initial weights come from, without any rank holding more than a unit of a model born on the meta device.

Neighbours: `engine.py` picks the source; `sharded.py` asks it unit by unit; `group.py` keeps the owned slices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from raydz.dist import Communicator
from raydz.errors import ConfigError
from raydz.zero.group import ValueSource
from raydz.zero.units import UnitSpec

UnitValues = Callable[[UnitSpec], ValueSource]


def choose_values(model: nn.Module, seed: int, comm: Communicator) -> UnitValues:
    """The source of a model's initial values.

    A model that holds values keeps them, rank 0's for all. One on the meta device computes slices if it has
    `initial_values(name, start, stop, seed)`; else its modules are made real one at a time, each under a seed from its
    name.

    Collective: the values of a real model are broadcast, unit by unit.

    Raises:
        ConfigError: a meta module has tensors but no way to reset them; names it.
    """
    if not is_on_meta(model):
        return lambda unit: _broadcast(unit, comm)
    compute = getattr(model, "initial_values", None)
    if compute is not None:
        return lambda unit: lambda p, start, stop: compute(p.name, start, stop, seed)
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if module._buffers and not module._parameters:
            _make_real(module, name, seed)
    return lambda unit: _materialised(unit, names, seed)


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory."""
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def unresettable_modules(model: nn.Module) -> list[str]:
    """Names of modules that hold tensors of their own and have neither `reset_parameters` nor `_reset_parameters`."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if (any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)))
        and _resetter(module) is None
    ]


def _resetter(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _seed(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "little")


def _materialised(unit: UnitSpec, names: dict[int, str], seed: int) -> ValueSource:
    modules = {id(place[0]): place[0] for spec in unit.parameters for place in spec.places[:1]}
    for module in modules.values():
        _make_real(module, names[id(module)], seed)
    values = {}
    for spec in unit.parameters:
        module, attribute = spec.places[0]
        spec.replace(cast(nn.Parameter, module._parameters[attribute]))
        values[spec.name] = spec.parameter.detach().reshape(-1)
    return lambda p, start, stop: values[p.name][start:stop].float()


def _make_real(module: nn.Module, name: str, seed: int) -> None:
    reset = _resetter(module)
    if reset is None:
        raise ConfigError(
            "a module on the meta device cannot be initialised", where=f"{name} ({type(module).__name__})",
            wanted="a reset_parameters() method on every module with tensors of its own",
            remedy="add the method, or pass the model with its values instead of on the meta device",
        )  # fmt: skip
    # A tied parameter of the module may belong to another unit that is built already: it must survive this.
    built = {key: p for key, p in module._parameters.items() if p is not None and not p.is_meta}
    for key, parameter in built.items():
        module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    module.to_empty(device="cpu", recurse=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(name, seed))
        reset()
    module._parameters.update(built)


def _broadcast(unit: UnitSpec, comm: Communicator) -> ValueSource:
    values = {}
    for spec in unit.parameters:
        tensor = spec.parameter.detach().contiguous()
        if comm.world_size > 1:
            comm.broadcast(tensor)
        values[spec.name] = tensor.reshape(-1)
    return lambda p, start, stop: values[p.name][start:stop].float()
