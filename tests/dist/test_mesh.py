"""Mesh arithmetic: every rank has one place, and groups partition the world."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydz.dist import MeshShape
from raydz.errors import ConfigError

AXES = st.integers(1, 5)
SHAPES = st.builds(MeshShape, replicate=AXES, data=AXES, sp=AXES)


def partition(shape: MeshShape, ranks_of) -> set[tuple[int, ...]]:
    return {tuple(ranks_of(rank)) for rank in range(shape.world_size)}


@given(SHAPES)
def test_shard_groups_partition_the_world_and_contain_their_rank(shape: MeshShape) -> None:
    groups = partition(shape, shape.shard_ranks)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.world_size))
    assert {len(group) for group in groups} == {shape.data * shape.sp}
    assert all(rank in shape.shard_ranks(rank) for rank in range(shape.world_size))


@given(SHAPES)
def test_replica_groups_partition_the_world_and_meet_each_shard_group_once(shape: MeshShape) -> None:
    replicas = partition(shape, shape.replica_ranks)
    assert sorted(rank for group in replicas for rank in group) == list(range(shape.world_size))
    for group in replicas:
        assert len(group) == shape.replicate
        for shards in partition(shape, shape.shard_ranks):
            assert len(set(group) & set(shards)) == 1
        positions = {shape.shard_ranks(rank).index(rank) for rank in group}
        assert len(positions) == 1  # replicas hold the same shard


@given(SHAPES)
def test_ranks_of_one_row_are_neighbours_and_every_batch_rank_has_sp_of_them(shape: MeshShape) -> None:
    batch_ranks = [shape.batch_rank(rank) for rank in range(shape.world_size)]
    assert batch_ranks == sorted(batch_ranks)
    assert set(batch_ranks) == set(range(shape.batch_world_size))
    assert all(batch_ranks.count(index) == shape.sp for index in set(batch_ranks))


def test_two_replicas_of_three_shards() -> None:
    shape = MeshShape.for_world(6, shard_size=3)
    assert (shape.replicate, shape.data, shape.sp) == (2, 3, 1)
    assert shape.shard_ranks(4) == [3, 4, 5]
    assert shape.replica_ranks(4) == [1, 4]


@given(world=st.integers(1, 64))
def test_without_a_shard_size_all_ranks_share_one_shard_group(world: int) -> None:
    shape = MeshShape.for_world(world)
    assert shape.world_size == world and shape.replicate == 1
    assert shape.shard_ranks(world - 1) == list(range(world))


@pytest.mark.parametrize("shard_size", [4, 7, -1])
def test_a_shard_size_that_does_not_divide_is_refused(shard_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        MeshShape.for_world(6, shard_size=shard_size)
    assert "parallel.shard_size" in str(caught.value) and "a divisor of 6" in str(caught.value)


@given(near=st.integers(2, 4), groups=st.integers(2, 4), replicas=st.integers(1, 3))
def test_near_ranks_are_neighbours_within_one_shard_group(near: int, groups: int, replicas: int) -> None:
    shape = MeshShape.for_world(near * groups * replicas, shard_size=near * groups, near_size=near)
    for rank in range(shape.world_size):
        ranks = shape.near_ranks(rank)
        assert rank in ranks and ranks == list(range(ranks[0], ranks[0] + near)) and ranks[0] % near == 0
        assert set(ranks) <= set(shape.shard_ranks(rank))


@pytest.mark.parametrize("near_size", [0, 1, 6])
def test_one_rank_or_all_of_them_make_no_near_group(near_size: int) -> None:
    assert MeshShape.for_world(6, near_size=near_size).near is None


@pytest.mark.parametrize(("world", "shard_size", "near_size"), [(6, None, 4), (4, None, 8), (4, 2, 4)])
def test_near_ranks_that_do_not_divide_a_shard_group_are_refused(world, shard_size, near_size) -> None:
    with pytest.raises(ConfigError, match="zero_hpz_partition_size") as caught:
        MeshShape.for_world(world, shard_size=shard_size, near_size=near_size)
    assert caught.value.got == near_size


def build_near(rank: int, world_size: int) -> tuple[int, int]:
    import torch.distributed as dist

    from raydz.dist import Mesh

    mesh = Mesh(MeshShape.for_world(world_size, near_size=2), rank)
    found = (dist.get_process_group_ranks(mesh.near_group)[0], dist.get_rank(mesh.near_group))
    known = len(dist.distributed_c10d._world.pg_map)
    mesh.close()
    assert len(dist.distributed_c10d._world.pg_map) == known - 3 and mesh.near_group is None
    return found


def test_every_rank_gets_its_near_group_and_closing_destroys_it(ranks) -> None:
    assert ranks(4).run(build_near) == [(0, 0), (0, 1), (2, 0), (2, 1)]


def build_and_close(rank: int, world_size: int) -> list[tuple[int, int] | None]:
    """(size, rank) in each group of a mesh with two replicas, then of nothing after closing it."""
    import torch.distributed as dist

    from raydz.dist import Mesh

    mesh = Mesh(MeshShape.for_world(world_size, shard_size=2), rank)
    groups = [mesh.gather_group, mesh.reduce_group, mesh.replica_group, mesh.world_group]
    found = [(dist.get_world_size(group), dist.get_rank(group)) for group in groups]
    known = len(dist.distributed_c10d._world.pg_map)
    mesh.close()
    assert len(dist.distributed_c10d._world.pg_map) == known - 4
    assert mesh.gather_group is mesh.reduce_group is mesh.replica_group is mesh.world_group is None
    return found


def test_every_rank_gets_its_groups_and_closing_destroys_them(ranks) -> None:
    assert ranks(4).run(build_and_close) == [
        [(2, 0), (2, 0), (2, 0), (4, 0)],
        [(2, 1), (2, 1), (2, 0), (4, 1)],
        [(2, 0), (2, 0), (2, 1), (4, 2)],
        [(2, 1), (2, 1), (2, 1), (4, 3)],
    ]
