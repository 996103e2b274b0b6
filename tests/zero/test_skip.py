"""A gradient that is not finite on one rank: every rank skips, nothing changes, and training ends when it goes on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.zero.models import Poisoned
from tests.zero.training import (
    Batch,
    Run,
    assert_close_weights,
    batch_for,
    num_labels,
    numpy_weights,
    owned_bytes,
    start,
    sum_loss,
    torch_optimizer,
    train_step,
)  # fmt: skip

BAD_STEP = 2
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear", "warmup_max_lr": 0.01}}


def bad_on_last_rank(model, batch: Batch, rank: int, step: int) -> Tensor:
    is_bad = step == BAD_STEP and rank == 1
    return sum_loss(model(batch["ids"], factor=math.inf if is_bad else 1.0), batch)


def nan_on_first_rank(model, batch: Batch, rank: int, step: int) -> Tensor:
    is_bad = step == BAD_STEP and rank == 0
    return sum_loss(model(batch["ids"], factor=math.nan if is_bad else 1.0), batch)


def bad_on_every_step(model, batch: Batch, rank: int, step: int) -> Tensor:
    return sum_loss(model(batch["ids"], factor=math.inf if rank == 1 else 1.0), batch)


def skip_once(rank: int, world_size: int, run: Run) -> dict:
    engine = start(run, scheduler=SCHEDULE)
    train_step(engine, run, rank, world_size, 1)
    before, lr = owned_bytes(engine), engine.schedule.lr(engine.global_steps + 1)
    _, skipped = train_step(engine, run, rank, world_size, BAD_STEP)
    after = owned_bytes(engine)
    _, taken = train_step(engine, run, rank, world_size, 3)
    found = {
        "unchanged": before == after,
        "skipped": skipped,
        "taken": taken,
        "counted": (engine.global_steps, engine.skipped_steps, engine.skipped_in_row),
        "lr": (lr, taken.lr),
        "weights": numpy_weights(engine),
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("loss", [bad_on_last_rank, nan_on_first_rank])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_all_ranks_skip_and_change_nothing(ranks, stage: int, bf16: bool, loss) -> None:
    run = Run(Poisoned, loss, stage=stage, bf16=bf16)
    for found in ranks(2).run(skip_once, run):
        assert found["unchanged"]
        assert found["skipped"].skipped and not math.isfinite(found["skipped"].grad_norm)
        assert found["skipped"].step == 1
        assert not found["taken"].skipped
        assert found["counted"] == (2, 1, 0)
        assert found["lr"] == (0.0, 0.0)  # the skipped step left the schedule at its second step


def skip_within_accumulation(rank: int, world_size: int, run: Run) -> tuple[bool, dict]:
    engine = start(run)
    for step in (1, BAD_STEP, 3):
        _, report = train_step(engine, run, rank, world_size, step)
        if step == BAD_STEP:
            skipped = report.skipped
    weights = numpy_weights(engine)
    engine.destroy()
    return skipped, weights


@pytest.mark.parametrize("stage", range(4))
def test_nothing_of_a_skipped_step_leaks_into_the_next(ranks, stage: int) -> None:
    run = Run(Poisoned, bad_on_last_rank, stage=stage, accumulation=2)
    torch.manual_seed(0)
    model = Poisoned()
    optimizer = torch_optimizer(model)
    for step in (1, 3):
        batch = batch_for(step)
        (sum_loss(model(batch["ids"]), batch) / num_labels(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
    skipped, weights = ranks(2).run(skip_within_accumulation, run)[0]
    assert skipped
    assert_close_weights(weights, {name: p.detach().numpy() for name, p in model.named_parameters()})


def skip_until_the_end(rank: int, world_size: int, run: Run) -> tuple[int, str]:
    from raydz.errors import TrainingError

    engine = start(run)
    message = ""
    for step in range(1, 10):
        try:
            train_step(engine, run, rank, world_size, step)
        except TrainingError as error:
            message = str(error)
            break
    engine.destroy()
    return step, message


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_too_many_skips_in_a_row_end_training_on_every_rank_and_name_the_parameter(ranks, stage, bf16) -> None:
    run = Run(Poisoned, bad_on_every_step, stage=stage, bf16=bf16, max_skipped=3)
    for step, message in ranks(2).run(skip_until_the_end, run):
        assert step == 3
        assert "where:  spot\n" in message


def huge_but_finite(rank: int, world_size: int, stage: int) -> tuple[float, bool]:
    """Gradients of 2e19, whose squares overflow fp32."""
    from raydz.engine import initialize

    model = torch.nn.Linear(3, 1, bias=False)
    config = {"train_batch_size": world_size, "zero_optimization": {"stage": stage}}
    engine = initialize(model, config, device="cpu")
    engine.backward(engine(torch.full((1, 3), 2e19)).sum(), denominator=world_size)
    report = engine.step()
    is_finite = all(tensor.isfinite().all() for tensor in engine.full_state_dict().values())
    engine.destroy()
    return report.grad_norm, bool(is_finite) and not report.skipped


@pytest.mark.parametrize("stage", range(4))
def test_huge_finite_gradients_are_no_reason_to_skip(ranks, stage: int) -> None:
    for norm, is_taken in ranks(2).run(huge_but_finite, stage):
        assert is_taken
        assert norm == pytest.approx(math.sqrt(3) * float(np.float32(2e19)), rel=2**-23)
