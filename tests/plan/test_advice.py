"""The words of the recommendation follow the article's order, and its figures are plans that fit."""

from __future__ import annotations

import re

import pytest

from raydz.config import Config, load
from raydz.plan import Planner, advise, decoder_planner
from raydz.units import parse_bytes

GIB = 1 << 30
USABLE = 0.9


def planner(**sections) -> Planner:
    """A bf16 model of 1.3e9 parameters, 2048 positions, asked for at stage 3 on 8 ranks."""
    base = {
        "model": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 32000},
        "data": {"sequence_length": 2048},
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    return decoder_planner(load(base | sections), "cuda")


def said(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def test_stage_2_comes_first_where_it_fits_and_the_larger_batch_second() -> None:
    lines = advise(planner(), 8, 80 * GIB)
    assert lines[0].startswith("first right: stage 2, no offload, one row a micro-batch")
    assert lines[1].startswith("then a larger batch")
    assert "stage 3, as configured, is not needed" in said(lines, "stage 3")


def test_the_recommended_micro_batch_fits_and_twice_as_much_does_not() -> None:
    ask = planner()
    rows = int(re.search(r"per_gpu (\d+) fits", said(advise(ask, 8, 40 * GIB), "then"))[1])
    assert rows > 1
    assert ask.at(8, stage=2, micro_batch=rows).memory.total <= USABLE * 40 * GIB
    assert ask.at(8, stage=2, micro_batch=2 * rows).memory.total > USABLE * 40 * GIB


def first_device(ask: Planner, start: str) -> str:
    """What is said on the smallest device, in steps of 1/8 GiB, where the first line begins with `start`."""
    for eighths in range(8, 640):
        lines = advise(ask, 8, eighths * GIB // 8)
        if lines[0].startswith(start):
            return lines[0]
    raise AssertionError(start)


def test_stage_3_is_advised_only_where_stage_2_does_not_fit() -> None:
    ask = planner(parallel={"activation_checkpointing": "full"})
    line = first_device(ask, "first right: stage 3, no")
    needed = float(re.search(r"stage 2 needs ([\d.]+) GiB", line)[1])
    assert needed == pytest.approx(ask.at(8, stage=2, micro_batch=1).memory.total / GIB, abs=0.06)
    assert needed > float(re.search(r"of ([\d.]+) GiB usable", line)[1])


def test_recomputation_is_advised_before_stage_3_which_sends_more() -> None:
    line = first_device(planner(), "first right: stage 2 and model.activation_checkpointing")
    assert "30% more computation" in line


def test_recomputation_is_not_advised_to_who_recomputes_already() -> None:
    ask = planner(parallel={"activation_checkpointing": "full"})
    for eighths in range(8, 320, 8):
        assert not any("activation_checkpointing" in line for line in advise(ask, 8, eighths * GIB // 8))


def test_more_ranks_are_counted_where_these_do_not_do() -> None:
    ask = planner()
    line = advise(ask, 2, 8 * GIB)[0]
    ranks = int(re.search(r"; (\d+) ranks do", line)[1])
    assert ask.at(ranks, stage=3, micro_batch=1, recomputes="full").memory.total <= USABLE * 8 * GIB
    assert ask.at(ranks // 2, stage=3, micro_batch=1, recomputes="full").memory.total > USABLE * 8 * GIB


def test_a_unit_too_large_for_any_number_of_ranks_is_said_to_be() -> None:
    assert "no number of ranks helps" in advise(planner(), 2, GIB // 2)[0]


def test_a_configured_micro_batch_that_does_not_fit_is_named_with_a_way_out() -> None:
    lines = advise(planner(train_micro_batch_size_per_gpu=64, train_batch_size=512), 8, 40 * GIB)
    line = said(lines, "64 rows")
    assert "gradient_accumulation_steps" in line or "activation_checkpointing" in line


def test_a_configured_stage_that_is_too_small_is_said_not_to_fit() -> None:
    lines = advise(planner(zero_optimization={"stage": 0}), 8, 24 * GIB)
    assert "does not fit" in said(lines, "stage 0, as configured")


def test_on_one_rank_no_stage_is_praised() -> None:
    lines = advise(planner(), 1, 80 * GIB)
    assert "nothing is shared" in lines[0]


def test_without_a_memory_size_each_stage_names_the_device_it_needs() -> None:
    lines = advise(planner(), 8, None)
    sizes = [int(re.search(r"a device of (\d+) GiB", line)[1]) for line in lines[:2]]
    need = [planner().at(8, stage=stage, micro_batch=1).memory.total for stage in (2, 3)]
    assert [n <= USABLE * s * GIB for n, s in zip(need, sizes, strict=True)] == [True, True]
    assert sizes[0] >= sizes[1]


def test_offload_is_named_only_where_it_is_asked_for() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    lines = advise(planner(zero_optimization=zero), 8, 80 * GIB)
    assert lines[0].startswith("offload keeps ") and " in host memory a rank; " in lines[0]
    assert not any(line.startswith("offload keeps") for line in advise(planner(), 8, 80 * GIB))


@pytest.mark.parametrize(
    ("sizes", "ranks", "wanted", "note"),
    [
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, 4, (16, 2, 2), ""),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8},
            2, (64, 2, 16), "needs gradient_accumulation_steps 16",
        ),
        (
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, 3, (12, 4, 1),
            "needs train_batch_size 12, gradient_accumulation_steps 1",
        ),
        ({}, 4, (4, 1, 1), "no batch size is given: micro-batches of one row"),
    ],
)  # fmt: skip
def test_batches_that_do_not_close_on_other_ranks_are_planned_with_a_note(sizes, ranks, wanted, note) -> None:
    config: Config = load({"model": {"hidden_size": 64}, **sizes})
    plan = decoder_planner(config, "cpu").at(ranks)
    assert (plan.batch.global_batch, plan.batch.micro_batch, plan.batch.accumulation) == wanted
    assert plan.note == note


def test_sizes_are_read_with_their_units() -> None:
    assert parse_bytes("80GiB") == 80 * GIB
