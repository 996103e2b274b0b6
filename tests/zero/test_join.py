"""Ranks with unequally many batches: the same weights as one process that averages what there is, on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.parity.uneven import LENGTH, ROWS, Uneven, batch, in_step, loss_of, oracle
from tests.support.ranks import RankFailure
from tests.zero.models import Adapted, Optional, Plain
from tests.zero.training import (
    Run,
    assert_close_weights,
    assert_equal_bits,
    numpy_weights,
    start,
)  # fmt: skip

SLOW = pytest.mark.slow


def config_of(case: Uneven, world_size: int) -> dict:
    return {"train_batch_size": ROWS * world_size * case.run.accumulation}


def train(rank: int, world_size: int, case: Uneven):
    engine = start(case.run, **config_of(case, world_size))
    reports = []
    with engine.join():
        for index in range(case.batches[rank]):
            ids = batch(rank, index)
            if case.with_denominator:
                tokens = len(in_step(case, index // case.run.accumulation)) * ROWS * LENGTH
                engine.backward(loss_of(engine, ids, "sum"), denominator=float(tokens))
            else:
                engine.backward(loss_of(engine, ids, "mean"))
            reports.append(engine.step())
    weights = numpy_weights(engine)
    last, steps, micro = engine.last_report, engine.global_steps, engine.micro_steps
    engine.destroy()
    return weights, steps, micro, last.grad_norm, len(reports)


def check(found: Sequence, case: Uneven) -> None:
    weights, norm = oracle(case)
    assert_close_weights(found[0][0], weights)
    for _, steps, micro, last_norm, _ in found:
        assert steps == case.num_steps and micro == steps * case.run.accumulation
        assert last_norm == pytest.approx(norm, rel=5e-6)


STAGES = [0, *(pytest.param(stage, marks=SLOW) for stage in (1, 2)), 3]


QUICK = {((1, 4), 0, 1), ((5, 2), 1, 2), ((1, 4), 2, 2), ((5, 2), 3, 2), ((4, 1, 1), 3, 1)}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else SLOW)
    for case in itertools.product([(1, 4), (5, 2), (2, 5, 3), (4, 1, 1)], range(4), (1, 2))
]


@pytest.mark.parametrize(("batches", "stage", "accumulation"), CASES)
def test_a_step_is_the_mean_of_what_takes_part(ranks, batches, stage: int, accumulation: int) -> None:
    case = Uneven(Run(Plain, stage=stage, accumulation=accumulation), batches)
    check(ranks(len(batches)).run(train, case), case)


@pytest.mark.parametrize("stage", STAGES)
def test_a_denominator_is_the_callers_word(ranks, stage: int) -> None:
    case = Uneven(Run(Plain, stage=stage, accumulation=2), (3, 5), with_denominator=True)
    check(ranks(2).run(train, case), case)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_rank_completes_the_step_it_has_begun(ranks, accumulation: int) -> None:
    case = Uneven(Run(Plain, stage=3, accumulation=accumulation), (4,))
    check(ranks(1).run(train, case), case)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(partial(Plain, recompute="non-reentrant"), id="recomputed"),
        pytest.param(partial(Plain, recompute="reentrant"), id="reentrant", marks=SLOW),
        pytest.param(partial(Plain, tied=True), id="tied"),
        pytest.param(partial(Plain, 3, order=(0, 2, 1, 2)), id="used twice"),
        pytest.param(Adapted, id="frozen"),
        pytest.param(Optional, id="unused"),
    ],
)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 3])
def test_whatever_units_do_is_shadowed(ranks, model, stage: int) -> None:
    case = Uneven(Run(model, stage=stage), (4, 1))
    check(ranks(2).run(train, case), case)


SETTINGS = [("stage3_prefetch_bucket_size", 0), ("reduce_bucket_size", 70), ("overlap_comm", False),
            ("stage3_max_reuse_distance", 10**9), ("ignore_unused_parameters", False)]  # fmt: skip


@pytest.mark.parametrize(
    "setting", [SETTINGS[1], *(pytest.param(s, marks=SLOW) for s in SETTINGS if s[1] != 70)], ids=str
)
def test_settings_of_the_engine_do_not_change_a_bit(ranks, setting) -> None:
    plain, other = (
        ranks(3).run(train, Uneven(Run(Plain, stage=3, zero=zero), (1, 3, 2)))[0][0] for zero in ((), (setting,))
    )
    assert_equal_bits(other, plain)


def test_even_batches_have_the_bits_of_training_without(ranks) -> None:
    case = Uneven(Run(Plain, stage=3, accumulation=2), (4, 4))
    joined = ranks(2).run(train, case)[0][0]
    assert_equal_bits(ranks(2).run(train_plainly, case)[0], joined)


def train_plainly(rank: int, world_size: int, case: Uneven):
    engine = start(case.run, **config_of(case, world_size))
    for index in range(case.batches[rank]):
        engine.backward(loss_of(engine, batch(rank, index), "mean"))
        engine.step()
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


def train_twice(rank: int, world_size: int, case: Uneven):
    """Two joins, with even training between them."""
    engine = start(case.run, **config_of(case, world_size))
    for _ in range(2):
        with engine.join():
            for index in range(case.batches[rank]):
                engine.backward(loss_of(engine, batch(rank, index), "mean"))
                engine.step()
        engine.backward(loss_of(engine, batch(rank, 50), "mean"))
        engine.step()
    steps, weights = engine.global_steps, numpy_weights(engine)
    engine.destroy()
    return steps, weights


def test_training_goes_on_after_a_join(ranks) -> None:
    case = Uneven(Run(Plain, stage=3), (1, 3))
    found = ranks(2).run(train_twice, case)
    assert [steps for steps, _ in found] == [8, 8]
    assert all(np.isfinite(w).all() for w in found[0][1].values())


def test_no_batches_at_all_are_no_steps(ranks) -> None:
    found = ranks(2).run(join_nothing, Uneven(Run(Plain, stage=3), (0, 0)))
    assert found == [0, 0]


def join_nothing(rank: int, world_size: int, case: Uneven) -> int:
    engine = start(case.run, **config_of(case, world_size))
    with engine.join():
        pass
    steps = engine.global_steps
    engine.destroy()
    return steps


def expect_error(rank: int, world_size: int, case: Uneven, kind: str) -> str:
    """What this rank says; errors are the same on all ranks, so that nobody waits."""
    from raydz.errors import TrainingError

    engine = start(case.run, **config_of(case, world_size))
    try:
        with engine.join():
            if kind == "within":
                with engine.join():
                    pass
            for index in range(case.batches[rank]):
                ids = batch(rank, index)
                loss = loss_of(engine, ids, "mean")
                if kind == "unfinished":
                    break
                engine.backward(loss, denominator=1.0 if kind == "mixed" and rank else None)
                if kind == "discarded":
                    engine.discard_step()
                engine.step()
    except TrainingError as error:
        engine.sharded.abort()
        engine.destroy()
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "batches", "words"),
    [
        ("empty", (2, 0), "no batch on rank 1"),
        ("within", (1, 1), "a join within a join"),
        ("unfinished", (1, 1), "within a micro-batch"),
        ("mixed", (1, 1), "have a denominator and some have not"),
        ("discarded", (1, 1), "discarded within a join"),
    ],
)
def test_what_cannot_be_joined_is_said_on_every_rank(ranks, kind: str, batches, words: str) -> None:
    for text in ranks(2).run(expect_error, Uneven(Run(Plain, stage=3), batches), kind):
        assert words in text


def raise_on_rank_one(rank: int, world_size: int) -> None:
    engine = start(Run(Plain, stage=3), **config_of(Uneven(Run(Plain), ()), world_size))
    with engine.join():
        for index in range(3):
            if rank and index:
                raise ValueError("the loader broke")
            engine.backward(loss_of(engine, batch(rank, index), "mean"))
            engine.step()


def test_an_exception_within_a_join_ends_every_rank(ranks) -> None:
    with pytest.raises(RankFailure, match="the loader broke"):
        ranks(2).run(raise_on_rank_one, limit_s=60)


class Normalised(Plain):
    """Counts the forwards it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return super().forward(ids)


def count_forwards(rank: int, world_size: int, case: Uneven) -> float:
    engine = start(case.run, **config_of(case, world_size))
    with engine.join():
        for index in range(case.batches[rank]):
            engine.backward(loss_of(engine, batch(rank, index), "mean"))
            engine.step()
    seen = float(engine.module.seen)
    engine.destroy()
    return seen


def test_a_shadow_runs_no_forward(ranks) -> None:
    assert ranks(2).run(count_forwards, Uneven(Run(Normalised, stage=3), (1, 4))) == [1.0, 4.0]
