"""Gradients against plain torch in one process: modules used in unusual ways, accumulation, one normaliser."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.zero.models import Adapted, Optional, Plain, Wrapped
from tests.zero.training import (
    Batch,
    Run,
    assert_close,
    assert_close_weights,
    batch_for,
    num_labels,
    numpy_weights,
    part,
    start,
    sum_loss,
    train_with_engine,
    train_with_torch,
)  # fmt: skip

STAGES = range(4)


def check(ranks, world: int, run: Run) -> None:
    assert_close(ranks(world).run(train_with_engine, run)[0], train_with_torch(run, world))


@pytest.mark.parametrize("recompute", ["", "non_reentrant"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_module_used_twice_in_one_forward_gets_the_sum_of_its_gradients(ranks, stage: int, recompute: str) -> None:
    model = partial(Plain, order=(0, 1, 0), recompute=recompute)
    check(ranks, 2, Run(model, stage=stage))
    check(ranks, 3, Run(model, stage=stage))


@pytest.mark.parametrize("model", [Plain, Adapted])
@pytest.mark.parametrize("stage", STAGES)
def test_reentrant_recomputation_is_right_where_a_block_is_used_once(ranks, stage: int, model) -> None:
    check(ranks, 2, Run(partial(model, recompute="reentrant"), stage=stage))


def reentrant_twice(rank: int, world_size: int, stage: int) -> str:
    from raydz.errors import TrainingError

    run = Run(partial(Plain, order=(0, 0, 1), recompute="reentrant"), stage=stage)
    try:
        outcome = train_with_engine(rank, world_size, run)
    except TrainingError as error:
        return str(error)
    if rank == 0:
        assert_close(outcome, train_with_torch(run, world_size))
    return "right"


@pytest.mark.parametrize("stage", STAGES)
def test_reentrant_recomputation_of_a_block_used_twice_is_right_or_refused_by_name(ranks, stage: int) -> None:
    for answer in ranks(2).run(reentrant_twice, stage):
        assert answer == "right" or ("layers.0" in answer and "use_reentrant=False" in answer)


def layer_drop_loss(model, batch: Batch, rank: int, step: int) -> Tensor:
    order = ((0, 1, 2), (0, 2), (0, 1, 2), (1,), (2, 1))[step - 1]
    return sum_loss(model(batch["ids"], order=order), batch)


@pytest.mark.parametrize("stage", STAGES)
def test_blocks_skipped_in_some_steps_come_back_with_current_weights(ranks, stage: int) -> None:
    check(ranks, 2, Run(partial(Plain, 3), layer_drop_loss, stage=stage, steps=5))


@pytest.mark.parametrize("model", [Plain, Adapted])
@pytest.mark.parametrize("boundary", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_equals_one_big_batch_and_nothing_leaks_into_the_next_step(ranks, stage, boundary, model) -> None:
    check(ranks, 2, Run(model, stage=stage, accumulation=3, boundary=boundary))


def extra_on_one_rank(model, batch: Batch, rank: int, step: int) -> Tensor:
    return sum_loss(model(batch["ids"], uses_extra=rank == 1 and step != 2), batch)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_unused_on_some_or_all_ranks_contributes_zeros_and_decays(ranks, stage: int) -> None:
    run = Run(Optional, extra_on_one_rank, stage=stage)
    check(ranks, 2, run)
    check(ranks, 3, run.with_(accumulation=2))
    weights = train_with_torch(run, 2).weights
    assert not np.array_equal(weights["never.weight"], train_with_torch(run.with_(steps=0), 2).weights["never.weight"])


@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple", "nested", "named"])
@pytest.mark.parametrize("stage", [1, 3])
def test_units_may_return_and_take_containers_of_tensors(ranks, stage: int, kind: str) -> None:
    check(ranks, 2, Run(partial(Wrapped, kind), stage=stage))


def rows_of_10_and_6(rank: int, world_size: int, accumulation: int) -> tuple[float, float]:
    """Mean loss and its gradient for rows of 10 and 6 counted tokens whose weight is the row's number."""
    from raydz.engine import initialize

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    config = {"train_batch_size": 2, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0}
    engine = initialize(model, config, device="cpu")
    rows = [torch.full((10, 1), 1.0), torch.full((6, 1), 3.0)]
    mine = rows if world_size == 1 else [rows[rank]]
    micros = [[row] for row in mine] if accumulation == len(mine) else [mine]
    local = 0.0
    for micro in micros:
        loss = sum(engine(row).sum() for row in micro)
        engine.backward(loss, denominator=16)
        local += loss.item()
        report = engine.step()
    total = sum(row[0] for row in engine.comms.reduce.all_gather_values([local]))
    engine.destroy()
    return total / 16, report.grad_norm


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 2), (2, 1)])
def test_rows_of_10_and_6_tokens_weigh_by_their_tokens(ranks, world: int, accumulation: int) -> None:
    for mean, norm in ranks(world).run(rows_of_10_and_6, accumulation):
        assert mean == 2.0 * (10 * 1 + 6 * 3) / 16  # 3.5; a mean of row means would give 4.0
        assert norm == (10 * 1 + 6 * 3) / 16


def two_and_six_tokens(rank: int, world_size: int, has_count: bool) -> float:
    """Gradient norm where d loss / d weight is 1 for each of 2 tokens on rank 0 and 3 for each of 6 on rank 1."""
    from raydz.engine import initialize

    model = torch.nn.Linear(1, 1, bias=False)
    config = {"train_batch_size": 2, "gradient_clipping": 0.0}
    engine = initialize(model, config, device="cpu")
    losses = engine(torch.tensor([[1.0]] * 2 if rank == 0 else [[3.0]] * 6))
    engine.backward(losses.sum() if has_count else losses.mean(), denominator=8 if has_count else None)
    norm = engine.step().grad_norm
    engine.destroy()
    return norm


def test_two_tokens_of_one_and_six_of_three_give_two_and_a_half(ranks) -> None:
    assert ranks(2).run(two_and_six_tokens, True) == [2.5, 2.5]


def test_without_a_count_the_loss_is_a_mean_of_the_ranks_means_as_in_deepspeed(ranks) -> None:
    assert ranks(2).run(two_and_six_tokens, False) == [2.0, 2.0]


def two_losses(rank: int, world_size: int, run: Run, together: bool):
    """Two backward passes before one step, in one call of `step`; forwards first, or each before its backward."""
    engine = start(run)
    for step in (1, 2):
        batch = batch_for(step)
        mine, count = part(batch, rank, world_size), num_labels(batch)
        halves = [part(mine, 0, 2), part(mine, 1, 2)]
        if together:
            losses = [run.loss(engine, half, rank, step) for half in halves]
            for loss in losses:
                engine.backward(loss, denominator=count)
        else:
            for half in halves:
                engine.backward(run.loss(engine, half, rank, step), denominator=count)
        engine.step()
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("model", [Plain, Adapted])
@pytest.mark.parametrize("together", [False, True], ids=["one_by_one", "forwards_first"])
@pytest.mark.parametrize("stage", STAGES)
def test_several_backwards_before_one_step_add_up(ranks, stage: int, together: bool, model) -> None:
    run = Run(model, stage=stage, steps=2)
    wanted = train_with_torch(run, 2).weights
    for world in (1, 2):
        assert_close_weights(ranks(world).run(two_losses, run, together)[0], wanted)


def test_every_rank_reports_the_same_global_norm(ranks) -> None:
    run = Run(Plain, stage=2, clip=0.0)  # `check` compares rank 0's with torch's
    outcomes = ranks(3).run(train_with_engine, run)
    assert all(outcome.norms == outcomes[0].norms for outcome in outcomes)
    assert_close(outcomes[0], train_with_torch(run.with_(clip=1e9), 3))
