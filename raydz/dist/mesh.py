"""Mesh axes (replicate, data, sp): which ranks share a shard, a replica, a row.

Neighbours: `engine.py` builds one; `zero/` shards over `shard_group`. `MeshShape` is pure arithmetic and is tested
without processes; `Mesh` adds the process groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from raydz.errors import ConfigError


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes, slowest first; rank = (replicate_index * data + data_index) * sp + sp_index.

    ZeRO shards over data·sp; replicas hold equal shards; the batch triangle counts replicate·data; the ranks of an
    sp group work on the same rows.

    Args:
        near: consecutive ranks of a shard group that keep a second copy of the weights among themselves (hpZ), fewer
            than all of them; None: there is none.
    """

    replicate: int
    data: int
    sp: int = 1
    near: int | None = None

    @classmethod
    def for_world(cls, world_size: int, *, shard_size: int | None = None, near_size: int = 1) -> MeshShape:
        """All ranks in one shard group, or in groups of `shard_size` neighbours that replicate each other.

        A `near_size` of 1, or of the whole shard group, makes no near groups: nothing would travel less far.

        Raises:
            ConfigError: `shard_size` does not divide `world_size`, or `near_size` the shard group.
        """
        shard_size = shard_size or world_size
        if shard_size < 1 or world_size % shard_size:
            raise ConfigError(
                "the shard group size does not divide the world",
                where="parallel.shard_size",
                got=shard_size,
                wanted=f"a divisor of {world_size}",
                remedy="change parallel.shard_size or the number of ranks",
            )
        if shard_size % max(1, near_size):
            raise ConfigError(
                "groups of near ranks do not divide the ranks that share a shard",
                where="zero_optimization.zero_hpz_partition_size", got=near_size, wanted=f"a divisor of {shard_size}",
                remedy="set it to the number of ranks of a node, or to 1",
            )  # fmt: skip
        near = near_size if 1 < near_size < shard_size else None
        return cls(replicate=world_size // shard_size, data=shard_size, near=near)

    @property
    def world_size(self) -> int:
        return self.replicate * self.data * self.sp

    @property
    def batch_world_size(self) -> int:
        """Ranks that work on different rows."""
        return self.replicate * self.data

    def batch_rank(self, rank: int) -> int:
        """Index of `rank` among those that work on different rows."""
        return rank // self.sp

    def shard_ranks(self, rank: int) -> list[int]:
        """Ranks over which the state that `rank` shares is sharded, in shard order."""
        size = self.data * self.sp
        first = rank // size * size
        return list(range(first, first + size))

    def near_ranks(self, rank: int) -> list[int]:
        """The ranks of a shard group between which the second copy that `rank` has a part of is sharded, in order."""
        size = self.near or self.data * self.sp
        first = rank // size * size
        return list(range(first, first + size))

    def replica_index(self, rank: int) -> int:
        """Which of the replicas `rank` belongs to."""
        return rank // (self.data * self.sp)

    def replica_ranks(self, rank: int) -> list[int]:
        """Ranks that hold the same shard as `rank`."""
        size = self.data * self.sp
        return list(range(rank % size, self.world_size, size))


class Mesh:
    """A `MeshShape` with this rank's process groups (None in a world of one).

    Collective: every rank of the world builds it, at the same point.
    """

    def __init__(self, shape: MeshShape, rank: int) -> None:
        self.shape, self.rank = shape, rank
        self.gather_group = self._split(shape.shard_ranks)
        self.reduce_group = self._split(shape.shard_ranks)
        self.replica_group = self._split(shape.replica_ranks) if shape.replicate > 1 else None
        self.near_group = self._split(shape.near_ranks) if shape.near else None
        everyone = list(range(shape.world_size))
        self.world_group = self._split(lambda _rank: everyone) if shape.replicate > 1 else self.gather_group

    def close(self) -> None:
        """Destroy the process groups: each holds threads and sockets. Not collective; nothing may be under way."""
        groups = [self.gather_group, self.reduce_group, self.replica_group, self.near_group]
        if self.world_group is not self.gather_group:
            groups.append(self.world_group)
        for group in groups:  # in one order on all ranks: NCCL's ends wait for each other
            if group is not None:
                dist.destroy_process_group(group)
        self.gather_group = self.reduce_group = self.replica_group = self.near_group = self.world_group = None

    def _split(self, ranks_of) -> dist.ProcessGroup | None:
        if self.shape.world_size == 1:
            return None
        mine = None
        for ranks in sorted({tuple(ranks_of(r)) for r in range(self.shape.world_size)}):
            group = dist.new_group(list(ranks))
            if self.rank in ranks:
                mine = group
        return mine
