"""Freezing and unfreezing between steps: the flat groups of the units concerned are formed anew.

Neighbours: `engine.py` offers `set_trainable` on top of this; `sharded.py` forms groups. See "Freezing" in README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raydz.errors import LayoutError
from raydz.zero.export import full_master, select, whole_of
from raydz.zero.group import FlatGroup
from raydz.zero.sharded import ShardedModel, Unit
from raydz.zero.units import ParameterSpec

GroupState = dict[str, Tensor]
"""Tensors (owned,) beside a group's weights, by kind."""


def change_trainable(
    sharded: ShardedModel,
    names: Sequence[str] | str,
    trainable: bool,
    state_of: Callable[[FlatGroup], GroupState],
) -> list[tuple[FlatGroup, GroupState]]:
    """Set `requires_grad` of parameters by name or pattern and regroup.

    Args:
        state_of: what belongs to a group of before, of the same kinds for every group.

    Returns:
        The new groups that are trained, and what of it belongs to them; zero for newly trained parameters.

    Collective: every rank, between steps. Memory: a unit's masters and states, whole, one unit at a time.

    Raises:
        ConfigError: a pattern matches nothing.
        LayoutError: a parameter that is no floating-point number shall be trained.
    """
    sharded.require_present("freezing or unfreezing")
    changed = {id(s): s for s in select(sharded, names) if s.parameter.requires_grad != trainable}
    _check(list(changed.values()), trainable)
    sharded.release_all()
    formed: list[tuple[FlatGroup, GroupState]] = []
    for unit in sharded.units:
        concerned = [spec for spec in unit.spec.parameters if id(spec) in changed]
        if not concerned:
            continue
        whole = _whole_unit(unit, state_of)
        for spec in concerned:
            spec.parameter.requires_grad_(trainable)
        weights = whole.pop("weight")
        sharded.regroup([unit], lambda p, start, stop, found=weights: found[p.name][start:stop])  # type: ignore[misc]
        formed += [(group, _own_parts(group, whole)) for group in unit.groups if group.trainable]
    return formed


def _check(changed: Sequence[ParameterSpec], trainable: bool) -> None:
    wrong = next((spec for spec in changed if trainable and not spec.parameter.is_floating_point()), None)
    if wrong is not None:
        raise LayoutError(
            "only floating-point parameters can be trained", where=wrong.name, got=wrong.parameter.dtype,
            remedy="leave it frozen",
        )  # fmt: skip


def _whole_unit(unit: Unit, state_of: Callable[[FlatGroup], GroupState]) -> dict[str, dict[str, Tensor]]:
    """Whole flat tensors by kind ("weight" too) and parameter name. Collective."""
    found: dict[str, dict[str, Tensor]] = {"weight": {}}
    for group in unit.groups:
        tensors = {"weight": full_master(group)}
        if group.trainable:
            tensors |= {kind: whole_of(group, own) for kind, own in state_of(group).items()}
        for kind, whole in tensors.items():
            for segment in group.layout.segments:
                found.setdefault(kind, {})[segment.name] = whole[segment.start : segment.stop].clone()
    return found


def _own_parts(group: FlatGroup, whole: dict[str, dict[str, Tensor]]) -> GroupState:
    start, stop = group.owned
    parts: GroupState = {}
    for kind, by_name in whole.items():
        own = torch.zeros(stop - start, dtype=torch.float32, device=group.device)
        for part in group.layout.intervals(start, stop):
            if part.name in by_name:
                own[part.offset : part.offset + part.stop - part.start] = by_name[part.name][part.start : part.stop]
        parts[kind] = own
    return parts
