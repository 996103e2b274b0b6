"""What the keys about sharding do to memory and traffic, as planned and as a real engine does it."""

from __future__ import annotations

import pytest

from tests.plan.measuring import measure
from tests.plan.test_memory import MODEL, config_of, plan_of

HEAD = MODEL["vocab_size"] * MODEL["hidden_size"]  # what comes after the last block, forth and back
NO_PREFETCH = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_buffers_of_the_accumulation_dtype_are_planned(ranks, stage: int, dtype: str) -> None:
    config = config_of(
        stage, gradient_accumulation_steps=2, bf16={"enabled": True}, data_types={"grad_accum_dtype": dtype}
    )
    plan = plan_of(config, 2)
    for found in ranks(2).run(measure, config):
        assert (found["gradients"], found["sums"]) == (plan.memory.gradients, plan.memory.sums)


@pytest.mark.parametrize("stage", range(4))
def test_an_all_reduce_in_place_of_a_reduce_scatter_is_planned(ranks, stage: int) -> None:
    config = config_of(stage, zero={"reduce_scatter": False}, gradient_accumulation_steps=2)
    plan = plan_of(config, 2)
    for found in ranks(2).run(measure, config):
        assert found["sent_bytes"] == plan.traffic.total


@pytest.mark.parametrize("most", [0, 100, 10_000])
def test_a_limit_of_persistent_elements_is_planned(ranks, most: int) -> None:
    zero = {"stage3_param_persistence_threshold": 1000, "stage3_model_persistence_threshold": most}
    config = config_of(3, zero=zero)
    plan = plan_of(config, 2)
    for found in ranks(2).run(measure, config):
        assert found["weights"] == plan.memory.weights
        assert found["sent_bytes"] == plan.traffic.total


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("distance", [2 * HEAD - 1, 2 * HEAD, 1_000_000_000])
def test_units_that_are_kept_for_reuse_are_planned(ranks, world: int, distance: int) -> None:
    config = config_of(3, zero=NO_PREFETCH | {"stage3_max_reuse_distance": distance}, gradient_accumulation_steps=3)
    plan, usual = plan_of(config, world), plan_of(config_of(3, zero=NO_PREFETCH, gradient_accumulation_steps=3), world)
    assert (plan.traffic.total < usual.traffic.total) == (distance >= 2 * HEAD)
    for found in ranks(world).run(measure, config):
        assert found["sent_bytes"] == plan.traffic.total
        assert 0.8 * plan.memory.gathered <= found["gathered_peak"] <= plan.memory.gathered


def test_without_overlap_less_is_under_way_as_planned(ranks) -> None:
    config = config_of(3, zero={"overlap_comm": False, "stage3_param_persistence_threshold": 0})
    plan, usual = plan_of(config, 2), plan_of(config_of(3, zero={"stage3_param_persistence_threshold": 0}), 2)
    assert plan.memory.gathered < usual.memory.gathered and plan.memory.buckets < usual.memory.buckets
    for found in ranks(2).run(measure, config):
        assert 0.8 * plan.memory.gathered <= found["gathered_peak"] <= plan.memory.gathered
        assert 0 < found["filled_peak"] <= plan.memory.buckets
