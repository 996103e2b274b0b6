"""Which owned elements are updated with which settings."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from raydz.zero import GroupLayout
from raydz.zero.settings import ParameterSettings
from raydz.zero.update import Run, plan_runs

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)
DECAYED, PLAIN = ParameterSettings(0.1), ParameterSettings(0.0)


def layout_of(shapes, world: int) -> GroupLayout:
    return GroupLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], world)


def by_dimension(shapes) -> dict[str, ParameterSettings]:
    return {f"p{i}": DECAYED if len(shape) > 1 else PLAIN for i, shape in enumerate(shapes)}


def runs(shapes, world: int = 1, rank: int = 0) -> list[Run]:
    layout = layout_of(shapes, world)
    return plan_runs(layout, *layout.shard_range(rank), by_dimension(shapes))


def test_a_run_ends_where_settings_change() -> None:
    found = runs([(4, 4), (16,), (), (2, 8)])
    assert found == [Run(0, 16, DECAYED, "p0", 0), Run(16, 33, PLAIN, "p1", 0), Run(48, 64, DECAYED, "p3", 0)]


def test_neighbours_with_equal_settings_are_one_run() -> None:
    assert runs([(3, 5), (2, 2), (4, 4)]) == [Run(0, 48, DECAYED, "p0", 0)]
    assert runs([(16,), (16,)]) == [Run(0, 32, PLAIN, "p0", 0)]


def test_offsets_count_from_the_shard() -> None:
    assert runs([(32,), (4, 8)], world=2, rank=1) == [Run(0, 32, DECAYED, "p1", 0)]


def test_a_run_that_must_not_join_others_knows_its_parameter_and_where_in_it_each_cut_begins() -> None:
    layout = layout_of([(32,), (8, 8)], 2)
    first, second = plan_runs(layout, 16, 96, by_dimension([(32,), (8, 8)]), joins=False)
    assert (first, second) == (Run(0, 16, PLAIN, "p0", 16), Run(16, 80, DECAYED, "p1", 0))
    assert [(cut.start, cut.stop, cut.first) for cut in second.cut(30)] == [(16, 46, 0), (46, 76, 30), (76, 80, 60)]


@given(shapes=SHAPES, world=st.integers(1, 5))
def test_every_element_is_in_one_run_with_its_parameters_settings(shapes, world: int) -> None:
    layout = layout_of(shapes, world)
    settings: dict[int, ParameterSettings] = {}
    for rank in range(world):
        start, _ = layout.shard_range(rank)
        for run in runs(shapes, world, rank):
            for element in range(start + run.start, start + run.stop):
                assert element not in settings
                settings[element] = run.settings
    for segment in layout.segments:
        wanted = by_dimension(shapes)[segment.name]
        assert all(
            settings[element] == wanted for element in range(segment.start, segment.start + math.prod(segment.shape))
        )
