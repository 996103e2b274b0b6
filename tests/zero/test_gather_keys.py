"""Keys about gathering, each by its effect: order of launches, gathers left out, elements that stay."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest

from raydz.dist import Communicator
from tests.zero.models import Plain
from tests.zero.test_accounting import BLOCKS, count_elements, memory_run, sizes, wanted_elements, watch_buffers
from tests.zero.training import Run, assert_equal_bits, start, train_step, train_with_engine


class Watched:
    """A collective in flight that notes when it is first awaited."""

    def __init__(self, handle, what: str, events: list[str]) -> None:
        self._handle, self._what, self._events = handle, what, events

    def wait(self) -> None:
        if self._what:
            self._events.append(f"await {self._what}")
            self._what = ""
        self._handle.wait()


def watched(method, kind: str, events: list[str]):
    def call(self, *args, what: str = "", **kwargs) -> Watched:
        events.append(f"launch {kind} {what}")
        return Watched(method(self, *args, what=what, **kwargs), f"{kind} {what}", events)

    return call


def launches(rank: int, world_size: int, run: Run) -> list[str]:
    """What is launched and awaited in the third step, in order."""
    events: list[str] = []
    gather, reduce = Communicator.all_gather_flat, Communicator.reduce_scatter_flat
    with (
        patch.object(Communicator, "all_gather_flat", watched(gather, "gather", events)),
        patch.object(Communicator, "reduce_scatter_flat", watched(reduce, "reduce", events)),
    ):
        engine = start(run)
        for step in (1, 2, 3):
            events.clear()
            train_step(engine, run, rank, world_size, step)
    engine.destroy()
    return events


def awaited_where_launched(events: list[str]) -> bool:
    """Whether every launch is followed by its own wait, and nothing else happens."""
    firsts, seconds = events[::2], events[1::2]
    return firsts == [second.replace("await", "launch", 1) for second in seconds]


def first(events: list[str], beginning: str) -> int:
    return next(index for index, event in enumerate(events) if event.startswith(beginning))


@pytest.mark.parametrize("stage", [2, 3])
def test_without_overlap_everything_is_awaited_where_it_is_launched(ranks, stage: int) -> None:
    buckets = ("reduce_bucket_size", 64)  # several flat groups a unit
    run = Run(partial(Plain, BLOCKS), stage=stage, zero=(buckets,))
    apart, overlapped = (
        ranks(2).run(launches, run.with_(zero=(buckets, ("overlap_comm", overlap)))) for overlap in (False, True)
    )
    for events in apart:
        assert awaited_where_launched(events) and len(events) >= 2 * 2 * (2 * BLOCKS + 2)
    for events in overlapped:
        assert sorted(events) == sorted(apart[0])
        assert first(events, "launch gather layers.1") < first(events, "await gather layers.0")
        assert first(events, "launch reduce layers.3") < first(events, "await reduce head")
    assert ranks(2).run(launches, run)[0] == overlapped[0]


def kept_after_forward(ranks, world: int, distance: int, **changes: int) -> list[str]:
    run = memory_run(3, stage3_max_reuse_distance=distance, **changes)
    return ranks(world).run(watch_buffers, run)[0]["forward"]


def test_a_unit_stays_when_its_next_use_is_near(ranks) -> None:
    """After the last block come the head forth and back, after the one before that block and the head twice."""
    _, block, head, _ = sizes(4)
    last, last_but_one = 2 * head, 2 * head + 2 * block
    assert kept_after_forward(ranks, 4, last - 1) == ["", "head"]
    assert kept_after_forward(ranks, 4, last) == ["", "layers.3", "head"]
    assert kept_after_forward(ranks, 4, last_but_one - 1) == ["", "layers.3", "head"]
    assert kept_after_forward(ranks, 4, last_but_one) == ["", "layers.2", "layers.3", "head"]


def test_a_unit_that_stays_is_not_gathered_again_and_the_result_is_the_same(ranks) -> None:
    _, block, head, _ = sizes(4)
    run = memory_run(3, stage3_max_reuse_distance=2 * head + 2 * block).with_(accumulation=3)
    usual = wanted_elements(3, 4, 3)
    for sent in ranks(4).run(count_elements, run):
        assert sent[1:] == [usual[1] - 3 * 2 * block * 3 // 4] * 2
    found, wanted = (ranks(4).run(train_with_engine, r)[0] for r in (run, memory_run(3).with_(accumulation=3)))
    assert_equal_bits(found.weights, wanted.weights)


@pytest.mark.parametrize("world", [2, 4])
def test_at_deepspeeds_distance_stage_3_holds_no_more_weights_than_stage_2(ranks, world: int) -> None:
    embed, block, head, root = sizes(world)
    psi = embed + BLOCKS * block + head + root
    run = memory_run(3, stage3_max_reuse_distance=1_000_000_000, stage3_prefetch_bucket_size=block)
    for found in ranks(world).run(watch_buffers, run):
        assert found["peak"] + psi // world <= psi
        assert len(found["forward"]) > 2  # it does keep some


def test_max_live_parameters_bounds_what_stays(ranks) -> None:
    _, block, head, root = sizes(4)
    limit = root + head + block
    for live, names in ((limit, ["", "layers.3", "head"]), (limit - 1, ["", "head"])):
        assert kept_after_forward(ranks, 4, 10**9, stage3_max_live_parameters=live) == names


def gathers_of_first_block(rank: int, world_size: int, run: Run) -> int:
    events = launches(rank, world_size, run)
    return sum(event.startswith("launch gather layers.0") for event in events)


def test_a_module_called_twice_in_a_row_is_gathered_once_for_both(ranks) -> None:
    run = memory_run(3).with_(model=partial(Plain, 2, order=(0, 0, 1)))
    assert ranks(2).run(gathers_of_first_block, run) == [2, 2]  # forth and back
    run = run.with_(model=partial(Plain, 2, order=(0, 1, 0, 1)))
    assert ranks(2).run(gathers_of_first_block, run) == [3, 3]


def persistent_elements(rank: int, world_size: int, run: Run) -> int:
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    names = [s.name for g in engine.sharded.groups if g.keeps_parameters for s in g.layout.segments]
    numel = sum(s.numel for g in engine.sharded.groups if g.keeps_parameters for s in g.layout.segments)
    held = sum(g.full.untyped_storage().nbytes() > 0 for g in engine.sharded.groups)
    engine.destroy()
    assert (held > 0) == bool(names)
    return numel


@pytest.mark.parametrize(
    ("most", "wanted"),
    [(0, 0), (11, 6), (12, 12), (31, 22), (52, 52), (10**6, 52)],
    ids=["none", "one of the norm's", "the norm", "and a bias", "exactly all", "no limit in effect"],
)
def test_the_models_threshold_bounds_all_that_stays_gathered(ranks, most: int, wanted: int) -> None:
    """Small ones, unit by unit from the root: the norm's 6 and 6, and a bias of 10 in each of four blocks."""
    run = memory_run(3, stage3_param_persistence_threshold=20, stage3_model_persistence_threshold=most)
    assert ranks(2).run(persistent_elements, run) == [wanted] * 2


def test_the_models_threshold_does_not_change_the_result(ranks) -> None:
    limits = {"stage3_param_persistence_threshold": 20, "stage3_model_persistence_threshold": 25}
    found, wanted = (ranks(2).run(train_with_engine, run)[0] for run in (memory_run(3, **limits), memory_run(3)))
    assert_equal_bits(found.weights, wanted.weights)
