"""Where initial weights come from, without any rank holding more than a unit of a model born on the meta device.

Neighbours: `engine.py` picks the source; `sharded.py` asks it unit by unit; `group.py` keeps the owned slices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, cast

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
    makers = {id(module): _Maker(model, module, name, seed) for name, module in model.named_modules()}
    for module in model.modules():
        if module._buffers and not module._parameters:
            makers[id(module)].make_real()
    return lambda unit: _materialised(unit, makers)


def place_buffers(model: nn.Module, device: torch.device, comm: Communicator) -> None:
    """Bring buffers to `device`, with rank 0's values, each contiguous. Collective: every rank of `comm`."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved = buffer.to(device).contiguous()
                comm.broadcast(moved)


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory."""
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def unresettable_modules(model: nn.Module) -> list[str]:
    """Names of modules that hold tensors of their own and that nothing resets: see `_resetters`.

    The model's rule does not count for modules that hold buffers alone (tables of rotary embeddings): few rules
    know them.
    """
    stuck = []
    for name, module in model.named_modules():
        has_parameters = any(True for _ in module.parameters(recurse=False))
        has_tensors = has_parameters or any(True for _ in module.buffers(recurse=False))
        if has_tensors and not _resetters(model if has_parameters else module, module):
            stuck.append(name or type(module).__name__)
    return stuck


def _resetters(model: nn.Module, module: nn.Module) -> list[Callable[[], object]]:
    """What gives a module its first values: its own method, then the model's rule for modules of all kinds.

    The rule is `_init_weights(module)` of the model, as Hugging Face's models have it.
    """
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    rule = getattr(model, "_init_weights", None)
    return [*([own] if own else []), *([partial(rule, module)] if rule else [])]


def _seed(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "little")


def _materialised(unit: UnitSpec, makers: dict[int, _Maker]) -> ValueSource:
    modules = {id(place[0]): place[0] for spec in unit.parameters for place in spec.places[:1]}
    for key in modules:
        makers[key].make_real()
    values = {}
    for spec in unit.parameters:
        module, attribute = spec.places[0]
        spec.replace(cast(nn.Parameter, module._parameters[attribute]))
        values[spec.name] = spec.parameter.detach().reshape(-1)
    return lambda p, start, stop: values[p.name][start:stop]


@dataclass(frozen=True)
class _Maker:
    """Gives one module of a model that was born on the meta device memory and first values."""

    model: nn.Module
    module: nn.Module
    name: str
    seed: int

    def make_real(self) -> None:
        """Under a seed from the module's name.

        Raises:
            ConfigError: nothing resets the module, or what does leaves a tensor as it is.
        """
        module, resetters = self.module, _resetters(self.model, self.module)
        if not resetters:
            self._refuse("a module on the meta device cannot be initialised", "no method that resets it")
        # A tied parameter of the module may belong to another unit that is built already: it must survive this.
        built = {key: p for key, p in module._parameters.items() if p is not None and not p.is_meta}
        for key, parameter in built.items():
            module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        module.to_empty(device="cpu", recurse=False)
        tensors = {**module._parameters, **module._buffers}
        unset = {key: _fill_with_mark(t) for key, t in tensors.items() if t is not None and t.numel()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(self.name, self.seed))
            for reset in resetters:
                reset()
        for key, mark in unset.items():
            current = module._parameters.get(key, module._buffers.get(key))
            if current is not None and torch.equal(current.detach().reshape(-1)[:1].view(torch.uint8), mark):
                self._refuse("a tensor on the meta device was not initialised", key)
        module._parameters.update(built)

    def _refuse(self, what: str, got: str) -> NoReturn:
        raise ConfigError(
            what, where=f"{self.name} ({type(self.module).__name__})", got=got,
            wanted="reset_parameters() of the module, or _init_weights(module) of the model, that sets all its tensors",
            remedy="add the method, or pass the model with its values instead of on the meta device",
        )  # fmt: skip


def _fill_with_mark(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of the first element, after all have been filled with a value that no initialisation leaves."""
    flat = tensor.detach().view(-1)
    if tensor.is_floating_point() or tensor.is_complex():
        flat.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        flat.fill_(torch.iinfo(tensor.dtype).max)
    else:  # both values are as likely as any other
        return torch.empty(0, dtype=torch.uint8)
    return flat[:1].view(torch.uint8).clone()


def _broadcast(unit: UnitSpec, comm: Communicator) -> ValueSource:
    values = {}
    for spec in unit.parameters:
        values[spec.name] = spec.parameter.detach().contiguous().reshape(-1)
        comm.broadcast(values[spec.name].view(torch.uint8))  # gloo does not know every dtype
    return lambda p, start, stop: values[p.name][start:stop]
