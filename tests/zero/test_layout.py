"""The table of a flat group: every element of every parameter has one place and one owner."""

from __future__ import annotations

import itertools
import math

from hypothesis import example, given
from hypothesis import strategies as st

from raydz.zero import GroupLayout
from raydz.zero.layout import ALIGNMENT, split_by_numel

PRIMES = [2, 3, 5, 7, 11, 13, 17, 31, 37, 101]
SIDES = st.sampled_from([0, 1, *PRIMES]) | st.integers(0, 40)
SHAPES = st.lists(st.lists(SIDES, max_size=3).map(tuple), max_size=8)
WORLDS = st.integers(1, 7)


def named(shapes: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{i}", shape) for i, shape in enumerate(shapes)]


@given(shapes=SHAPES, world=WORLDS)
@example(shapes=[], world=3)
@example(shapes=[(0, 3), ()], world=4)
@example(shapes=[(1,), (2,), (13,)], world=7)
def test_segments_are_aligned_disjoint_and_in_order(shapes, world: int) -> None:
    layout = GroupLayout.of(named(shapes), world)
    assert [(s.name, s.shape) for s in layout.segments] == named(shapes)
    end = 0
    for segment in layout.segments:
        assert segment.start % ALIGNMENT == 0
        assert segment.start >= end
        assert segment.stop - segment.start == math.prod(segment.shape)
        end = segment.stop
    assert end <= layout.padded_numel


@given(shapes=SHAPES, world=WORLDS)
@example(shapes=[(3,)], world=4)
def test_shards_are_equal_aligned_and_cover_the_group(shapes, world: int) -> None:
    layout = GroupLayout.of(named(shapes), world)
    ranges = [layout.shard_range(rank) for rank in range(world)]
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.padded_numel
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert len({stop - start for start, stop in ranges}) == 1
    assert all(start % ALIGNMENT == 0 for start, _ in ranges)


@given(shapes=SHAPES, world=WORLDS)
def test_padding_costs_less_than_a_quantum_a_parameter_and_one_a_rank(shapes, world: int) -> None:
    layout = GroupLayout.of(named(shapes), world)
    numel = sum(math.prod(shape) for shape in shapes)
    assert numel <= layout.padded_numel < numel + ALIGNMENT * (len(shapes) + world)


@given(shapes=SHAPES, world=WORLDS)
@example(shapes=[(0,), (1,), (3,), (1, 5), (37, 11)], world=4)
def test_intervals_of_all_ranks_cover_each_parameter_exactly_once(shapes, world: int) -> None:
    layout = GroupLayout.of(named(shapes), world)
    seen = {name: [0] * math.prod(shape) for name, shape in named(shapes)}
    for rank in range(world):
        start, stop = layout.shard_range(rank)
        for part in layout.intervals(start, stop):
            assert 0 <= part.start < part.stop <= math.prod(part.shape)
            assert part.offset >= 0 and part.offset + part.stop - part.start <= stop - start
            segment = next(s for s in layout.segments if s.name == part.name)
            assert start + part.offset == segment.start + part.start  # the shard's element is the parameter's
            for element in range(part.start, part.stop):
                seen[part.name][element] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


@given(shapes=SHAPES, world=WORLDS)
def test_gaps_are_what_no_segment_has(shapes, world: int) -> None:
    layout = GroupLayout.of(named(shapes), world)
    owners = [0] * layout.padded_numel
    for start, stop in [*((s.start, s.stop) for s in layout.segments), *layout.gaps()]:
        for element in range(start, stop):
            owners[element] += 1
    assert owners == [1] * layout.padded_numel


@given(numels=st.lists(st.integers(0, 50), max_size=20), limit=st.integers(1, 100))
def test_split_keeps_order_and_the_limit_but_for_single_large_items(numels: list[int], limit: int) -> None:
    runs = split_by_numel(numels, limit)
    assert [i for run in runs for i in run] == list(range(len(numels)))
    for run in runs:
        assert len(run) == 1 or sum(numels[i] for i in run) <= limit
    for left, right in itertools.pairwise(runs):  # and no run ends before it must
        assert sum(numels[i] for i in left) + numels[right[0]] > limit
