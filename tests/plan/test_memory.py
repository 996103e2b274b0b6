"""The plan against the tensors and the traffic of real engines on gloo ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from raydz.config import Config, load
from raydz.plan import Plan, decoder_planner
from tests.plan.measuring import measure

MODEL = {
    "kind": "llama", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
ROWS, LENGTH = 12, 16


def config_of(stage: int, **sections) -> Config:
    base = {
        "model": MODEL,
        "data": {"sequence_length": LENGTH},
        "train_batch_size": ROWS,
        "zero_optimization": {"stage": stage, **sections.pop("zero", {})},
    }
    return load(base | sections)


def plan_of(config: Config, world: int) -> Plan:
    return decoder_planner(config, "cpu").at(world)


def compare(ranks, world: int, config: Config) -> None:
    """Every part of the model states, byte for byte, and the elements that a step sends."""
    plan = plan_of(config, world)
    parts = plan.memory.parts()
    for found in ranks(world).run(measure, config):
        assert {name: found[name] for name in ("weights", "masters", "moments", "gradients", "sums")} == {
            name: parts[name] for name in ("weights", "masters", "moments", "gradients", "sums")
        }
        assert found["total"] == plan.memory.model_states


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_model_states_are_the_bytes_of_the_engines_tensors(ranks, world: int, stage: int, bf16: bool) -> None:
    compare(ranks, world, config_of(stage, bf16={"enabled": bf16}))


@pytest.mark.parametrize(
    "keys", [("bf16_optimizer_states",), ("bf16_optimizer_states", "bf16_master_weights_and_grads")]
)
@pytest.mark.parametrize(
    ("stage", "accumulation"), [(0, 1), (3, 1), *(pytest.param(s, 3, marks=pytest.mark.slow) for s in range(4))]
)
def test_bf16_states_and_masters_cost_what_the_plan_says(ranks, stage: int, accumulation: int, keys) -> None:
    bf16 = {"enabled": True, **dict.fromkeys(keys, True)}
    compare(ranks, 2, config_of(stage, bf16=bf16, gradient_accumulation_steps=accumulation))


@pytest.mark.parametrize("stage", range(4))
def test_summing_micro_batches_costs_what_the_plan_says(ranks, stage: int) -> None:
    compare(ranks, 2, config_of(stage, bf16={"enabled": True}, gradient_accumulation_steps=3))


@pytest.mark.parametrize(
    "sections",
    [
        {"zero": {"stage3_param_persistence_threshold": 0}},
        {"zero": {"stage3_param_persistence_threshold": 5000}},
        {"zero": {"reduce_bucket_size": 2000}},
        {"model": MODEL | {"tie_word_embeddings": True}},
        {"parallel": {"units": ["model.layers.*"]}},
        {"parallel": {"gradient_reduction": "boundary"}, "gradient_accumulation_steps": 3},
        {"parallel": {"fp32_modules": ["*norm"]}, "bf16": {"enabled": True}},
        {"fp16": {"enabled": True}},
        {"optimizer": {"type": "Lion"}},
        {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}},
        {"optimizer": {"type": "SGD"}},
        {"train": {"ema_decay": 0.9}},
    ],
    ids=str,
)
def test_keys_that_change_memory_change_the_plan_alike(ranks, sections: dict) -> None:
    compare(ranks, 2, config_of(3, **sections))


@pytest.mark.slow  # four ranks are started
def test_a_shard_group_smaller_than_the_world_holds_its_own_part(ranks) -> None:
    compare(ranks, 4, config_of(2, parallel={"shard_size": 2}))


def test_muons_matrices_have_one_state_and_the_rest_two(ranks) -> None:
    config = config_of(3, optimizer={"type": "Muon"})
    found = [result["moments"] for result in ranks(2).run(measure, config)]
    assert plan_of(config, 2).memory.moments == pytest.approx(sum(found) / 2, rel=0.01)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_sends_the_elements_that_the_plan_counts(ranks, world: int, stage: int, accumulation: int) -> None:
    """fp32 throughout, so bytes are four times the elements that the engine's clock counts."""
    config = config_of(stage, gradient_accumulation_steps=accumulation)
    plan = plan_of(config, world)
    for found in ranks(world).run(measure, config):
        assert 4 * found["sent"] == plan.traffic.total


INT8 = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
NEAR = {"zero_hpz_partition_size": 2}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("world", "zero"),
    [
        (2, INT8),
        (2, {"zero_quantized_nontrainable_weights": True}),
        pytest.param(3, INT8, marks=pytest.mark.slow),
        pytest.param(4, NEAR, marks=pytest.mark.slow),
        pytest.param(4, NEAR | INT8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_zeropp_holds_and_sends_the_bytes_that_the_plan_counts(ranks, world: int, zero: dict, bf16: bool) -> None:
    config = config_of(3, zero=zero, bf16={"enabled": bf16}, gradient_accumulation_steps=3 if world == 4 else 2)
    plan = plan_of(config, world)
    for found in ranks(world).run(measure, config):
        assert found["weights"] == plan.memory.weights
        assert found["total"] == plan.memory.model_states
        assert found["sent_bytes"] == plan.traffic.total


def test_a_packed_row_is_as_long_as_the_plan_thinks() -> None:
    from raydz.ops import quantise
    from raydz.plan import groups

    lengths = [*range(0, 3000, 7), 1 << 20, (1 << 20) + 16]
    assert [groups.packed_bytes(n) for n in lengths] == [quantise.packed_bytes(n) for n in lengths]


@pytest.mark.parametrize("prefetch", [0, 1, 30_000, None])
def test_gathered_units_are_at_most_what_the_plan_says_and_nearly_so(ranks, prefetch: int | None) -> None:
    zero = {"stage3_param_persistence_threshold": 0}
    if prefetch is not None:
        zero["stage3_prefetch_bucket_size"] = prefetch
    config = config_of(3, zero=zero)
    planned = plan_of(config, 2).memory.gathered
    for found in ranks(2).run(measure, config):
        assert 0.8 * planned <= found["gathered_peak"] <= planned


def test_gradients_in_flight_stay_below_the_planned_buckets(ranks) -> None:
    for stage in (2, 3):
        config = config_of(stage)
        plan = plan_of(config, 2)
        for found in ranks(2).run(measure, config):
            assert 0 < found["filled_peak"] <= plan.memory.buckets


def test_the_shares_are_those_of_the_article() -> None:
    """7e9 parameters in bf16: 16 bytes a parameter, 112 GB whole (stage 0 with the split master: 14, and 4 of sums)."""
    config = load(
        {
            "model": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000},
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
        }
    )
    planner = decoder_planner(config, "cuda")
    psi = planner.at(8).num_params
    assert psi == pytest.approx(6.7e9, rel=0.02)
    at = partial(planner.at, 8)
    bytes_each = [(at(stage=stage).memory.model_states - at(stage=stage).memory.sums) / psi for stage in range(4)]
    assert bytes_each == pytest.approx([14, 4 + 10 / 8, 2 + 10 / 8, 12 / 8], rel=0.01)
    assert [at(stage=stage).memory.sums / psi for stage in range(4)] == pytest.approx([4, 0.5, 0.5, 0.5], rel=0.01)


def test_torch_has_the_bytes_that_the_plan_has() -> None:
    assert [torch.float32.itemsize, torch.bfloat16.itemsize, torch.float16.itemsize] == [4, 2, 2]
