"""A step that the caller discards: what a skipped one leaves, and a cycle of momentum that reaches the update."""

from __future__ import annotations

import pytest

from raydz.errors import ConfigError, TrainingError
from tests.zero.models import Plain
from tests.zero.training import LR, Run, batch_for, num_labels, owned_bytes, part, start, train_step

CYCLE = {"cycle_min_lr": LR, "cycle_max_lr": 2 * LR, "cycle_first_step_size": 3}


def discard_once(rank: int, world_size: int, run: Run) -> dict:
    engine = start(run, scheduler={"type": "OneCycle", "params": CYCLE})
    train_step(engine, run, rank, world_size, 1)
    before, batch = owned_bytes(engine), part(batch_for(2), rank, world_size)
    for i in range(run.accumulation):
        engine.backward(
            run.loss(engine, part(batch, i, run.accumulation), rank, 2), denominator=num_labels(batch_for(2))
        )
        if i + 1 < run.accumulation:
            with pytest.raises(TrainingError, match="last micro-batch"):
                engine.discard_step()
            engine.step()
    report = engine.discard_step()
    found = {
        "unchanged": before == owned_bytes(engine),
        "report": (report.step, report.skipped, report.grad_norm > 0),
        "counted": (engine.global_steps, engine.skipped_steps, engine.skipped_in_row, engine.micro_steps),
        "next": train_step(engine, run, rank, world_size, 3)[1],
    }
    with pytest.raises(TrainingError, match="no gradients"):
        engine.discard_step() if run.accumulation == 1 else engine.optimizer.gradient_norm()
    engine.destroy()
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_nothing_changes_but_the_count(ranks, stage: int, accumulation: int) -> None:
    for found in ranks(2).run(discard_once, Run(Plain, stage=stage, accumulation=accumulation)):
        assert found["unchanged"]
        assert found["report"] == (1, True, True)
        assert found["counted"] == (1, 1, 0, 2 * accumulation)
        assert not found["next"].skipped and found["next"].step == 2
        assert found["next"].lr == pytest.approx(LR + LR / 3)  # the schedule's second step


def test_momentum_is_cycled_where_the_optimizer_has_one() -> None:
    run = Run(Plain)
    engine = start(run, scheduler={"type": "OneCycle", "params": CYCLE})
    betas = []
    for step in range(1, 5):
        train_step(engine, run, 0, 1, step)
        betas.append((engine.optimizer.optimizer.beta1, engine.optimizer.optimizer.beta2))
    assert betas == [
        (0.8, 0.99),
        (pytest.approx(0.9 - 0.1 / 3), 0.99),
        (pytest.approx(0.9 - 0.2 / 3), 0.99),
        (0.8, 0.99),
    ]
    engine.destroy()
    sgd = {"type": "SGD", "params": {"lr": LR}}
    with pytest.raises(ConfigError, match="cycle_momentum"):
        start(run, scheduler={"type": "OneCycle", "params": CYCLE}, optimizer=sgd)
    start(run, scheduler={"type": "OneCycle", "params": {**CYCLE, "cycle_momentum": False}}, optimizer=sgd).destroy()
