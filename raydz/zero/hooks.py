"""Hooks that let a `ShardedModel` follow its module through forward and backward.

Neighbours: `sharded.py` decides what happens; this file only says when. Pre-backward hooks sit on the tensors that a
unit returns, so that they fire with the first gradient that enters it, also when its forward is recomputed by
activation checkpointing (recomputation fires before_forward but may end before after_forward).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from raydz.errors import LayoutError
from raydz.zero.gradients import GroupGradients
from raydz.zero.sharded import ShardedModel, Unit


def install_hooks(sharded: ShardedModel) -> list:
    """Put hooks on every unit's module and every trainable parameter; returns handles with `remove()`."""
    handles: list = []
    for unit in sharded.units:
        handles.append(unit.spec.module.register_forward_pre_hook(_before_forward(sharded, unit), with_kwargs=True))
        handles.append(unit.spec.module.register_forward_hook(_after_forward(sharded, unit)))
        for grads in unit.gradients:
            handles += [
                parameter.register_post_accumulate_grad_hook(_gradient_ready(sharded, unit, grads, index))
                for index, parameter in enumerate(grads.group.parameters)
            ]
    if any(not group.keeps_parameters for group in sharded.groups):
        handles += _guard_copies(sharded)
    return handles


def _before_forward(sharded: ShardedModel, unit: Unit):
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        sharded.before_forward(unit)
        if unit.has_frozen and torch.is_grad_enabled() and not sharded.in_backward:
            inputs = [t for t in find_tensors((args, kwargs)) if t.requires_grad]
            if inputs:
                unit.open_inputs += 1
                torch.autograd.graph.register_multi_grad_hook(inputs, _inputs_done(sharded, unit))

    return hook


def _inputs_done(sharded: ShardedModel, unit: Unit):
    def hook(_grads) -> None:
        unit.open_inputs = max(0, unit.open_inputs - 1)
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


def _guard_copies(sharded: ShardedModel) -> list:
    """Make `state_dict` and `deepcopy` raise while parameters are released, instead of copying NaN placeholders."""

    def refuse() -> None:
        released = [group for group in sharded.groups if not group.keeps_parameters and not group.is_gathered]
        if released:
            raise LayoutError(
                "parameters are sharded and not gathered", where=released[0].specs[0].name,
                remedy="use engine.full_state_dict(), or wrap the call in `with engine.gathered():`",
            )  # fmt: skip

    def before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        refuse()

    def deepcopy(memo: dict):
        refuse()
        clone = copy.copy(sharded.model)
        clone.__dict__.pop("__deepcopy__", None)
        clone.__dict__ = copy.deepcopy({k: v for k, v in sharded.model.__dict__.items() if k != "__deepcopy__"}, memo)
        return clone

    sharded.model.__dict__["__deepcopy__"] = deepcopy
    return [module.register_state_dict_pre_hook(before_state_dict) for module in sharded.model.modules()]
