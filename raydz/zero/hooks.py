"""Hooks that let a `ShardedModel` follow its module through forward and backward.

Neighbours: `sharded.py` decides what happens; this file only says when. Pre-backward hooks sit on the tensors that a
unit returns, so that they fire with the first gradient that enters it, also when its forward is recomputed by
activation checkpointing (recomputation fires before_forward but may end before after_forward).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from raydz.errors import LayoutError
from raydz.zero.gradients import GroupGradients
from raydz.zero.sharded import ForwardCall, ShardedModel, Unit

_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"),
    *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
)


def install_hooks(sharded: ShardedModel) -> list:
    """Put hooks on every unit's module and every trainable parameter; returns handles with `remove()`."""
    handles: list = sharded.precision.install_casts(sharded.model)
    for unit in sharded.units:
        handles.append(unit.spec.module.register_forward_pre_hook(_before_forward(sharded, unit), with_kwargs=True))
        handles.append(unit.spec.module.register_forward_hook(_after_forward(sharded, unit)))
        for grads in unit.gradients:
            handles += [
                parameter.register_post_accumulate_grad_hook(_gradient_ready(sharded, unit, grads, index))
                for index, parameter in enumerate(grads.group.parameters)
            ]
    return [*handles, _CopyGuard(sharded, handles)]


def _before_forward(sharded: ShardedModel, unit: Unit):
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        sharded.before_forward(unit)
        if not unit.has_frozen or not torch.is_grad_enabled():
            return
        inputs = [t for t in find_tensors((args, kwargs)) if t.requires_grad]
        if inputs and not sharded.in_backward:
            call = ForwardCall()
            unit.open_calls.add(call)
            torch.autograd.graph.register_multi_grad_hook(inputs, _inputs_done(sharded, unit, call))
        elif inputs and not unit.open_calls:  # reentrant checkpointing: the forward before had no graph to follow
            unit.recomputed = ForwardCall()
            unit.open_calls.add(unit.recomputed)

    return hook


def _inputs_done(sharded: ShardedModel, unit: Unit, call: ForwardCall):
    def hook(_grads) -> None:
        unit.open_calls.discard(call)
        if sharded.in_backward:
            sharded.unit_progressed(unit)

    return hook


def _after_forward(sharded: ShardedModel, unit: Unit):
    def hook(module: nn.Module, args: tuple, output) -> None:
        if torch.is_grad_enabled() and not sharded.in_backward:
            tensors = list(find_tensors(output))
            if not tensors and unit.groups:
                raise LayoutError(
                    "no tensor found in what a unit returns, so its backward cannot be followed",
                    where=f"{unit.spec.name or 'the model'} ({type(module).__name__})", got=type(output).__name__,
                    wanted="a tensor, or tuples, lists, mappings and dataclasses of tensors",
                )  # fmt: skip
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _grad: sharded.before_backward(unit))
        sharded.after_forward(unit)

    return hook


def _gradient_ready(sharded: ShardedModel, unit: Unit, grads: GroupGradients, index: int):
    def hook(parameter: nn.Parameter) -> None:
        sharded.gradient_ready(unit, grads, index, parameter)

    return hook


def find_tensors(value) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from find_tensors(getattr(value, entry.name))


class _CopyGuard:
    """Keeps `state_dict` and `deepcopy` from handing out NaN placeholders, old weights, or hooks of this engine."""

    def __init__(self, sharded: ShardedModel, hooks: list) -> None:
        self._sharded = sharded
        self._modules = list(sharded.model.modules())
        self._handles = [module.register_state_dict_pre_hook(self._before_state_dict) for module in self._modules]
        self._handles += [module.register_load_state_dict_pre_hook(self._before_load) for module in self._modules]
        self._ids = {handle.id for handle in [*hooks, *self._handles]}
        for module in self._modules:
            module.__dict__["__deepcopy__"] = partial(self._deepcopy, module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            module.__dict__.pop("__deepcopy__", None)

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._refuse()

    def _before_load(self, module: nn.Module, *_: object) -> None:
        """Values that a module takes reach neither other ranks' shards nor the rest of a 16-bit weight's master."""
        if self._sharded.accepts_writes:
            return
        for group in self._sharded.groups:
            has_all = group.keeps_parameters and group.owned == (0, group.layout.padded_numel)
            if not has_all or group.weights.master() is not group.weights.compute:
                raise LayoutError(
                    "a state cannot be loaded into a sharded module: its masters would stay what they are",
                    where=group.specs[0].name, wanted="engine.load_full_state_dict(state)",
                    remedy="or wrap the call in `with engine.gathered(modify=True):`, where rank 0's values count",
                )  # fmt: skip

    def _refuse(self) -> None:
        for group in self._sharded.groups:
            if group.is_whole:
                group.finish_gather()  # which an update in host memory may still be on the way to
        stale = next((group for group in self._sharded.groups if not group.is_gathered), None)
        if stale is not None:
            raise LayoutError(
                "parameters are sharded and not gathered", where=stale.specs[0].name,
                remedy="use engine.full_state_dict(), or wrap the call in `with engine.gathered():`",
            )  # fmt: skip

    def _deepcopy(self, module: nn.Module, memo: dict) -> nn.Module:
        self._refuse()
        attributes = {key: value for key, value in module.__dict__.items() if key != "__deepcopy__"}
        for key in _HOOKS:
            attributes[key] = OrderedDict((i, hook) for i, hook in attributes[key].items() if i not in self._ids)
        memo[id(module)] = clone = module.__class__.__new__(module.__class__)
        clone.__dict__.update(copy.deepcopy(attributes, memo))
        return clone
