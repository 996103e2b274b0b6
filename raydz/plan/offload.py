"""What of the model states is not on the device: bytes in host memory and on disks, as `offload/` keeps them.

Neighbours: `memory.py` has the parts they are taken from, `estimate.py` puts both together. The rules are those of
`zero/hosted.py` and `offload/parameters.py`, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raydz.config.engine import ZeroConfig
from raydz.plan.groups import GroupShape
from raydz.plan.memory import ElementBytes, Sharding


@dataclass(frozen=True)
class Offloaded:
    """Bytes of one rank.

    Args:
        host: in host memory, gradients on their way included.
        disk: on `nvme_path`.
        second: host memory besides, with which updates begin before the gradient norm is known.
        weights, masters, moments: of these parts of the device's, what is not there.
    """

    host: int = 0
    disk: int = 0
    second: int = 0
    weights: int = 0
    masters: int = 0
    moments: int = 0


def offloaded(groups: Sequence[GroupShape], sharding: Sharding, bytes_of: ElementBytes, zero: ZeroConfig) -> Offloaded:
    """What the two offload sections take off the device."""
    optimizer, parameters = (
        "none" if section is None else section.device for section in (zero.offload_optimizer, zero.offload_param)
    )
    ratio = 1.0 if zero.offload_optimizer is None else zero.offload_optimizer.ratio
    trained = [group for group in groups if group.trainable]
    hosted = {id(group) for group in _hosted(trained, sharding, ratio if optimizer != "none" else 0.0)}
    host, disk, second, weights, masters, moments = (0,) * 6
    for group in groups:
        each, owned = bytes_of.of(group), sharding.owned(group)
        leaves = parameters != "none" and sharding.stage == 3 and not sharding.keeps_weights(group)
        is_hosted = id(group) in hosted
        weights += group.shard_numel * each.compute if leaves else 0
        if is_hosted:
            states = owned * (each.compute + each.masters + each.moments)
            masters, moments = masters + owned * each.masters, moments + owned * each.moments
            host += owned * (sharding.gradient_bytes(each) if sharding.ranks == 1 else each.summed)
            host, disk = (host + states, disk) if optimizer == "cpu" else (host, disk + states)
            second += states if optimizer == "cpu" else 0
        if leaves and not (is_hosted and optimizer == "cpu"):  # else the optimizer's copy is the shard
            shard = group.shard_numel * each.compute
            host, disk = (host + shard, disk) if parameters == "cpu" else (host, disk + shard)
    return Offloaded(host, disk, second, weights, masters, moments)


def _hosted(groups: Sequence[GroupShape], sharding: Sharding, ratio: float) -> list[GroupShape]:
    """All but the first groups that fit into a share of 1 - ratio."""
    numels = [sharding.owned(group) for group in groups]
    room, chosen = round((1 - ratio) * sum(numels)), []
    for group, numel in zip(groups, numels, strict=True):
        if numel > room:
            chosen.append(group)
        else:
            room -= numel
    return chosen
