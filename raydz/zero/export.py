"""Whole parameters out of shards and back: for export, for comparison, for people who look at them or change them.

Neighbours: `engine.py` offers `full_state_dict`, `load_full_state_dict` and `gathered` on top of this.
See "Whole parameters" in README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from raydz.dist.agreement import on_rank_zero
from raydz.errors import ConfigError, LayoutError
from raydz.optim import WeightShard
from raydz.zero.group import FlatGroup
from raydz.zero.sharded import ShardedModel
from raydz.zero.units import ParameterSpec, matches


def full_parameters(sharded: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of every parameter, one flat group in memory at a time.

    Dtype: fp32 masters of what is trained; frozen parameters in the dtype they are kept in.
    Collective: every rank, to the end of the iteration. Ownership: each tensor is the caller's.
    """
    sharded.require_present("reading whole parameters")
    for group in sharded.groups:
        whole = full_master(group)
        for segment in group.layout.segments:
            yield segment.name, whole[segment.start : segment.stop].view(segment.shape).clone()


def full_master(group: FlatGroup) -> Tensor:
    """All ranks' exact values, (padded_numel,). Collective. Ownership: may be live memory, to be read only."""
    return whole_of(group, group.weights.master())


def whole_of(group: FlatGroup, own: Tensor) -> Tensor:
    """What `own` is a rank's part of; `own` itself where ranks own all. Collective: every rank of the group."""
    if own.numel() == group.layout.padded_numel:
        return own.to(group.device)
    whole = torch.empty(group.layout.padded_numel, dtype=own.dtype, device=group.device)
    start, stop = group.layout.shard_range(group.comm.rank)
    whole[start:stop] = own
    group.comm.all_gather_flat(whole, tag=group.index + 1, what=group.label).wait()
    return whole


def select(sharded: ShardedModel, names: Sequence[str] | str | None) -> list[ParameterSpec]:
    """Parameters whose names match one of the patterns (fnmatch), or that lie in a module with such a name.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    specs = [spec for unit in sharded.units for spec in unit.spec.parameters]
    if names is None:
        return specs
    patterns = [names] if isinstance(names, str) else list(names)
    for pattern in patterns:
        if not any(matches(spec, pattern) for spec in specs):
            raise ConfigError(
                "no parameter has this name", got=pattern, wanted="a pattern of parameter or module names",
                remedy="for example " + ", ".join(spec.name for spec in specs[:3]),
            )  # fmt: skip
    return [spec for spec in specs if any(matches(spec, pattern) for pattern in patterns)]


def _groups_of(sharded: ShardedModel, names: Sequence[str] | str | None) -> list[FlatGroup]:
    wanted = {id(spec) for spec in select(sharded, names)}
    return [group for group in sharded.groups if any(id(spec) in wanted for spec in group.specs)]


@contextmanager
def gathered(sharded: ShardedModel, names: Sequence[str] | str | None = None) -> Iterator[None]:
    """Let parameters of the module show their compute-dtype values within the block; reading only.

    Collective: every rank enters together. Memory: what is gathered, on every rank.
    """
    sharded.require_present("gathering parameters", "lp_params")
    for group in _groups_of(sharded, names):
        group.finish_gather()
    try:
        yield
    finally:
        sharded.release_all()


@contextmanager
def modified(sharded: ShardedModel, names: Sequence[str] | str | None = None) -> Iterator[None]:
    """Let parameters show their exact values within the block; afterwards rank 0's count, to the last bit.

    Dtype: fp32 if trained, also in a 16-bit model. Nothing is written when the block raises.

    Collective: every rank enters and leaves together. Memory: what is gathered, on every rank.

    Raises:
        LayoutError: a parameter was given another shape.
    """
    sharded.require_present("changing parameters")
    sharded.release_all()
    lent = [(group, full_master(group).clone()) for group in _groups_of(sharded, names)]
    for group, whole in lent:
        group.lend(whole)
    sharded.accepts_writes = True
    try:
        yield
        for group, whole in lent:
            _collect(group, whole)
            _write(sharded, group, whole)
    finally:
        sharded.accepts_writes = False
        for group, _ in lent:
            group.take_back()


def _collect(group: FlatGroup, whole: Tensor) -> None:
    """Bring home what was put in the place of a parameter's data instead of being written into it."""
    for parameter, segment in zip(group.parameters, group.layout.segments, strict=True):
        home = whole[segment.start : segment.stop].view(segment.shape)
        if parameter.shape != home.shape:
            raise LayoutError(
                "a parameter was given another shape", where=segment.name, got=tuple(parameter.shape),
                wanted=segment.shape,
            )  # fmt: skip
        if parameter.data_ptr() != home.data_ptr() or parameter.dtype != home.dtype:
            home.copy_(parameter.detach())


def _write(sharded: ShardedModel, group: FlatGroup, whole: Tensor) -> None:
    """Take rank 0's values as the exact ones. Collective: every rank."""
    sharded.comms.world.broadcast(whole.view(torch.uint8))
    start, stop = group.owned
    group.weights.store(whole[start:stop])
    group.mark_updated()


def load_full(sharded: ShardedModel, state: Mapping[str, Tensor] | None, *, strict: bool) -> None:
    """Set masters and buffers from rank 0's `state` (others' is not looked at); optimizer states stay.

    Collective: every rank. Memory: one flat group at a time.

    Raises:
        LayoutError: on every rank: names are missing or unknown (`strict`), or a shape differs; nothing is changed.
    """
    sharded.require_present("loading a state")
    comm, given = sharded.comms.world, dict(state or {}) if sharded.comms.world.rank == 0 else {}
    known = set(on_rank_zero(comm, lambda: _known_names(sharded, given, strict)))
    sharded.release_all()
    for group in sharded.groups:
        if not any(spec.name in known for spec in group.specs):
            continue
        whole = full_master(group).clone()
        for spec, segment in zip(group.specs, group.layout.segments, strict=True):
            values = next((given[name] for name in (spec.name, *spec.aliases) if name in given), None)
            if values is not None:
                WeightShard(whole[segment.start : segment.stop]).store(values.detach().reshape(-1))
        _write(sharded, group, whole)
    for name, buffer in sharded.model.named_buffers():
        if name in known:
            buffer.copy_(given.get(name, buffer))
            flat = buffer.reshape(-1).view(torch.uint8)  # a view: the engine made every buffer contiguous
            comm.broadcast(flat)


def _known_names(sharded: ShardedModel, given: Mapping[str, Tensor], strict: bool) -> list[str]:
    """Names (first ones) of the parameters and buffers that `given` has."""
    model = sharded.model
    shapes: dict[str, tuple[str, torch.Size]] = {}
    for spec in select(sharded, None):
        shapes |= {name: (spec.name, spec.parameter.shape) for name in (spec.name, *spec.aliases)}
    required = {spec.name for spec in select(sharded, None)}
    shapes |= {name: (name, buffer.shape) for name, buffer in model.named_buffers()}
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        required |= {path + n for n, b in module._buffers.items() if b is not None} - {
            path + n for n in module._non_persistent_buffers_set
        }
    found = [shapes[name][0] for name in given if name in shapes]
    missing, unknown = sorted(required - set(found)), sorted(set(given) - set(shapes))
    if strict and (missing or unknown):
        raise LayoutError(
            "a state does not fit the model", got=f"missing: {missing[:5]}, unknown: {unknown[:5]}",
            wanted="every parameter and buffer, as full_state_dict() gives them", remedy="or pass strict=False",
        )  # fmt: skip
    for name, values in given.items():
        if name in shapes and tuple(values.shape) != tuple(shapes[name][1]):
            raise LayoutError(
                "a tensor has another shape", where=name, got=tuple(values.shape), wanted=tuple(shapes[name][1])
            )
    return found
