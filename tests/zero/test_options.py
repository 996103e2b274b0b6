"""Sizes that are not given scale with the model, and never exceed DeepSpeed's."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import pytest
import torch
from torch import nn

from raydz.zero import ParameterSpec, UnitSpec, ZeroOptions
from tests.zero.models import Plain
from tests.zero.training import Run, start


def units(*sizes: int) -> list[UnitSpec]:
    """The root and units of so many elements."""
    made = []
    for index, size in enumerate(sizes):
        parameter = nn.Parameter(torch.empty(size, device="meta"))
        made.append(UnitSpec(str(index or ""), nn.Identity(), [ParameterSpec("p", parameter, [])]))
    return made


def test_defaults_scale_with_the_largest_unit_that_is_not_the_root() -> None:
    options = ZeroOptions().resolved(units(999_999, 6_400, 3_200))
    assert (options.prefetch_numel, options.persistence_numel) == (6_400, 100)


def test_a_model_of_a_root_alone_counts_its_root() -> None:
    assert ZeroOptions().resolved(units(640)).prefetch_numel == 640


def test_deepspeeds_sizes_are_the_upper_bounds() -> None:
    options = ZeroOptions().resolved(units(0, 10**10))
    assert (options.bucket_numel, options.prefetch_numel, options.persistence_numel, options.max_live_numel) == (
        500_000_000, 50_000_000, 100_000, 1_000_000_000,
    )  # fmt: skip


def test_what_is_given_is_kept_even_zero() -> None:
    given = ZeroOptions(bucket_numel=5, prefetch_numel=0, persistence_numel=0, max_live_numel=0, reuse_numel=0)
    found = asdict(given.resolved(units(0, 100)))
    assert found == {name: getattr(given, name) for name in found}


def test_a_model_without_parameters_has_sizes_too() -> None:
    options = ZeroOptions().resolved(units(0))
    assert options.bucket_numel and options.persistence_numel == 0


def held_elements(rank: int, world_size: int, stage: int) -> int:
    """Elements of weights, gathered or sharded, after a step with default sizes."""
    run = Run(partial(Plain, 4), stage=stage, zero=())
    engine = start(run, zero_optimization={"stage": stage})
    full = sum(group.full.untyped_storage().nbytes() // 4 for group in engine.sharded.groups)
    shards = sum(g.weights.compute.numel() for g in engine.sharded.groups if not g.keeps_parameters)
    engine.destroy()
    return full + shards


@pytest.mark.parametrize("world", [2, 4])
def test_a_small_model_with_default_sizes_holds_less_at_stage_3_than_at_stage_2(ranks, world: int) -> None:
    at_2, at_3 = (ranks(world).run(held_elements, stage)[0] for stage in (2, 3))
    assert at_3 * world == at_2
