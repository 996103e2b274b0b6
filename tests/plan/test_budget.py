"""Refusals and out-of-memory errors name bytes by part and the key that shrinks the largest."""

from __future__ import annotations

import pytest

from raydz.config import load
from raydz.errors import ConfigError, TrainingError
from raydz.plan import Plan, check_fits, decoder_planner, describe_parts, key_to_change, out_of_memory
from raydz.units import format_bytes


def plan_of(stage: int, ranks: int = 4, **sections) -> Plan:
    base = {
        "model": {"hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "vocab_size": 4096},
        "data": {"sequence_length": 16},
        "train_batch_size": 8,
    }
    zero = {"stage": stage} | sections.pop("zero", {})
    return decoder_planner(load(base | {"zero_optimization": zero} | sections), "cuda").at(ranks)


def test_what_fits_passes_and_one_byte_less_is_refused() -> None:
    plan = plan_of(2)
    check_fits(plan, plan.memory.certain, "cuda:0")
    with pytest.raises(ConfigError) as caught:
        check_fits(plan, plan.memory.certain - 1, "cuda:0")
    error = caught.value
    assert error.where == "cuda:0"
    for name, value in plan.memory.parts().items():
        if value:
            assert f"{name} {format_bytes(value)}" in error.got
    assert format_bytes(plan.memory.certain - 1) in error.wanted


def test_estimates_alone_never_refuse() -> None:
    plan = plan_of(2, train_batch_size=4096, data={"sequence_length": 512})
    assert plan.memory.activations > plan.memory.certain
    check_fits(plan, plan.memory.certain, "cuda:0")


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        (plan_of(0), "zero_optimization.stage 1 or more"),  # moments are the largest
        (plan_of(2), "zero_optimization.stage 3"),  # weights
        (plan_of(3, zero={"stage3_param_persistence_threshold": 10**8}), "stage3_param_persistence_threshold"),
        (plan_of(3, zero={"stage3_prefetch_bucket_size": 10**9}), "stage3_prefetch_bucket_size"),
        (plan_of(3, ranks=64, train_batch_size=64), "bucket_size"),
        (plan_of(2, train_batch_size=4096, data={"sequence_length": 512}), "activation_checkpointing"),
        (
            plan_of(3, train_batch_size=2**14, model={"activation_checkpointing": True, "vocab_size": 10**5},
                    train={"loss_chunk_tokens": 0}),
            "train_micro_batch_size_per_gpu less than",
        ),
        (plan_of(3, ranks=1, train_batch_size=1), "more ranks than 1"),
    ],
)  # fmt: skip
def test_the_key_is_that_of_the_largest_part_that_can_shrink(plan: Plan, key: str) -> None:
    assert key in key_to_change(plan)


def test_a_refusal_names_a_key_of_the_parts_that_refused_it() -> None:
    plan = plan_of(0, train_batch_size=4096, data={"sequence_length": 512})
    assert "activation_checkpointing" in key_to_change(plan)
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage 1"):
        check_fits(plan, 1, "cuda:0")


def test_following_the_key_makes_the_largest_part_smaller() -> None:
    at0, at1 = plan_of(0).memory, plan_of(1).memory
    assert at1.moments < at0.moments
    threshold = {"stage3_param_persistence_threshold": 10**8}
    assert plan_of(3).memory.weights < plan_of(3, zero=threshold).memory.weights


def test_an_out_of_memory_sets_the_measured_beside_the_planned() -> None:
    plan = plan_of(3)
    error = out_of_memory(plan, {"weights": 3 << 20, "moments": 5 << 20}, "while training", "tried 2 GiB")
    assert isinstance(error, TrainingError)
    assert error.got == "measured moments 5.0 MiB, weights 3.0 MiB"
    assert describe_parts(plan.memory.parts()) in error.wanted
    assert error.remedy == key_to_change(plan)
    assert "tried 2 GiB" in str(error)


def test_parts_of_nothing_are_nothing() -> None:
    assert describe_parts({"weights": 0}) == "nothing"
