"""Which owned elements are updated with which settings."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from raydz.zero import GroupLayout
from raydz.zero.update import Run, plan_runs

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)


def layout_of(shapes, world: int) -> GroupLayout:
    return GroupLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], world)


def test_matrices_decay_and_vectors_and_scalars_do_not() -> None:
    layout = layout_of([(4, 4), (16,), (), (2, 8)], 1)
    assert plan_runs(layout, 0, layout.padded_numel, 0.1) == [Run(0, 16, 0.1), Run(16, 33, 0.0), Run(48, 64, 0.1)]


def test_neighbours_with_equal_settings_are_one_run() -> None:
    layout = layout_of([(3, 5), (2, 2), (4, 4)], 1)
    assert plan_runs(layout, 0, layout.padded_numel, 0.1) == [Run(0, 48, 0.1)]
    assert plan_runs(layout_of([(4, 4), (16,)], 1), 0, 32, 0.0) == [Run(0, 32, 0.0)]


def test_offsets_count_from_the_shard() -> None:
    layout = layout_of([(32,), (4, 8)], 2)
    assert plan_runs(layout, *layout.shard_range(1), 0.1) == [Run(0, 32, 0.1)]


@given(shapes=SHAPES, world=st.integers(1, 5), decay=st.sampled_from([0.0, 0.1]))
def test_every_element_is_in_one_run_with_its_parameters_decay(shapes, world: int, decay: float) -> None:
    layout = layout_of(shapes, world)
    settings: dict[int, float] = {}
    for rank in range(world):
        start, stop = layout.shard_range(rank)
        for run in plan_runs(layout, start, stop, decay):
            for element in range(start + run.start, start + run.stop):
                assert element not in settings
                settings[element] = run.weight_decay
    for segment in layout.segments:
        wanted = decay if len(segment.shape) > 1 else 0.0
        assert all(
            settings[element] == wanted for element in range(segment.start, segment.start + math.prod(segment.shape))
        )
