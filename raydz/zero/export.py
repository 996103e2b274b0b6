"""Whole parameters out of shards: for export, for comparison with an unsharded model, for people who look.

Neighbours: `engine.py` offers `full_state_dict` and `gathered` on top of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from raydz.zero.group import FlatGroup
from raydz.zero.sharded import ShardedModel


def full_parameters(sharded: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 master values) of every parameter, one flat group in memory at a time.

    Collective: every rank, to the end of the iteration. Ownership: each tensor is the caller's.
    """
    for group in sharded.groups:
        whole = _full_master(group)
        for segment in group.layout.segments:
            yield segment.name, whole[segment.start : segment.stop].view(segment.shape).clone()


def _full_master(group: FlatGroup) -> Tensor:
    master = group.weights.master().float()
    if master.numel() == group.layout.padded_numel:
        return master
    whole = torch.empty(group.layout.padded_numel, dtype=torch.float32, device=group.device)
    start, stop = group.owned
    whole[start:stop] = master
    group.comm.all_gather_flat(whole, tag=group.index + 1).wait()
    return whole


@contextmanager
def gathered(sharded: ShardedModel) -> Iterator[None]:
    """Let every parameter of the module show its compute-dtype values within the block; reading only.

    Collective: every rank enters together. Memory: the whole model on every rank.
    """
    for unit in sharded.units:
        unit.launch_gather()
        unit.finish_gather()
    try:
        yield
    finally:
        sharded.release_all()
