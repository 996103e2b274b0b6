"""Who owns a matrix, which travel together, and how states are packed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from raydz.zero.layout import GroupLayout, Segment
from raydz.zero.matrices import Matrix, assign_owners, batches
from raydz.zero.settings import ParameterSettings
from raydz.zero.states import GroupStates

SETTINGS = ParameterSettings(0.0, is_matrix=True)
NUMELS = st.lists(st.integers(1, 1000), max_size=12)


def matrices_of(numels: list[int]) -> list[Matrix]:
    return [Matrix(0, Segment(f"m{i}", (numel, 1), 0), SETTINGS) for i, numel in enumerate(numels)]


@given(numels=NUMELS, world=st.integers(1, 5))
def test_loads_differ_by_at_most_the_largest_matrix(numels, world: int) -> None:
    owners = assign_owners(numels, world)
    loads = [sum(n for n, owner in zip(numels, owners, strict=True) if owner == rank) for rank in range(world)]
    assert len(owners) == len(numels) and max(loads) - min(loads) <= max(numels, default=0)


def test_equal_matrices_are_dealt_out() -> None:
    assert sorted(assign_owners([5] * 6, 3)) == [0, 0, 1, 1, 2, 2]
    assert assign_owners([1, 9, 4, 4], 2) == [1, 0, 1, 1]


@given(numels=NUMELS, world=st.integers(1, 5), limit=st.integers(1, 2000))
def test_batches_keep_order_and_have_work_for_every_rank(numels, world: int, limit: int) -> None:
    found = list(batches(matrices_of(numels), world, limit))
    assert [m.segment for batch in found for m in batch] == [m.segment for m in matrices_of(numels)]
    for batch in found[:-1]:
        assert len(batch) >= world and sum(m.segment.numel for m in batch) >= limit
        assert {m.owner for m in batch} == set(range(world))


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5), world=st.integers(1, 5)
)
def test_parts_of_all_ranks_make_the_matrix(shapes, world: int) -> None:
    layout = GroupLayout.of([(f"m{i}", shape) for i, shape in enumerate(shapes)], world)
    for segment in layout.segments:
        parts = [Matrix(0, segment, SETTINGS).part(layout.shard_range(rank)) for rank in range(world)]
        assert [e for start, stop in parts for e in range(start, stop)] == list(range(segment.numel))


ONE, TWO = ("a",), ("b", "c")


def test_states_of_one_family_lie_beside_the_weights() -> None:
    states = GroupStates([(0, 10, TWO), (16, 20, TWO)], 32, torch.device("cpu"))
    assert {name: t.numel() for name, t in states.tensors.items()} == {"b": 32, "c": 32}
    assert states.of(17, 20)["c"].data_ptr() == states.tensors["c"][17:].data_ptr()


def test_states_of_two_families_are_packed() -> None:
    states = GroupStates([(0, 10, ONE), (16, 20, TWO), (32, 39, ONE)], 48, torch.device("cpu"))
    assert {name: t.numel() for name, t in states.tensors.items()} == {"a": 17, "b": 4, "c": 4}
    for start, stop in ((0, 10), (32, 35), (35, 39)):
        states.of(start, stop)["a"].fill_(start + 1.0)
    assert states.tensors["a"].tolist() == [1.0] * 10 + [33.0] * 3 + [36.0] * 4
    assert set(states.of(16, 20)) == set(TWO) and not states.tensors["b"].any()
