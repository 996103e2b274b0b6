"""What else happens around steps: evaluation, undeclared backwards, old graphs, copies, exceptions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from tests.zero.models import Adapted, ByWeight, Plain
from tests.zero.training import (
    Run,
    assert_close,
    assert_close_weights,
    assert_equal_bits,
    batch_for,
    build,
    num_labels,
    numpy_weights,
    part,
    start,
    token_loss,
    train_step,
    train_with_engine,
    train_with_torch,
)  # fmt: skip

STAGES = range(4)


def train_and_evaluate(rank: int, world_size: int, run: Run, mode: str) -> tuple[dict, list[float], list[float]]:
    """Weights, and what evaluation saw before each step; with `mode` "" without evaluation."""
    engine, seen, norms = start(run), [], []
    context = {"": None, "no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[mode]
    for step in range(1, run.steps + 1):
        if context:
            with context():
                engine.eval()
                seen.append(token_loss(engine, batch_for(50 + step), rank, step).item())
                engine.train()
        _, report = train_step(engine, run, rank, world_size, step)
        norms.append(report.grad_norm)
    weights = numpy_weights(engine)
    engine.destroy()
    return weights, seen, norms


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad"])
@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_steps_sees_current_weights_and_changes_nothing(ranks, stage: int, mode: str) -> None:
    for model in (Plain, Adapted):
        run = Run(model, stage=stage, accumulation=2)
        weights, seen, norms = ranks(2).run(train_and_evaluate, run, mode)[0]
        wanted, _, wanted_norms = ranks(2).run(train_and_evaluate, run, "")[0]
        assert_equal_bits(weights, wanted)
        assert norms == wanted_norms
        for step, loss in enumerate(seen, start=1):
            oracle = build(run)
            oracle.load_state_dict({n: torch.from_numpy(w) for n, w in weights_after(run, step - 1).items()})
            assert loss == pytest.approx(token_loss(oracle, batch_for(50 + step), 0, step).item(), rel=1e-5)


def weights_after(run: Run, steps: int) -> dict[str, np.ndarray]:
    return train_with_torch(run.with_(steps=steps), 2).weights


def evaluate_within_a_step(rank: int, world_size: int, run: Run) -> dict[str, np.ndarray]:
    """Evaluation and a look at whole weights between forward and backward, and between micro-batches."""
    engine = start(run)
    for step in range(1, run.steps + 1):
        batch = batch_for(step)
        for i in range(run.accumulation):
            loss = run.loss(engine, part(part(batch, rank, world_size), i, run.accumulation), rank, step)
            with torch.no_grad():
                token_loss(engine, batch, rank, step)
            with engine.gathered():
                assert all(p.isfinite().all() for p in engine.module.parameters())
            engine.backward(loss, denominator=num_labels(batch))
            with torch.no_grad():
                token_loss(engine, batch, rank, step)
            engine.step()
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("model", [Plain, Adapted])
@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_within_a_step_changes_nothing(ranks, stage: int, model) -> None:
    run = Run(model, stage=stage, accumulation=2)
    wanted, _, _ = ranks(2).run(train_and_evaluate, run, "")[0]
    assert_equal_bits(ranks(2).run(evaluate_within_a_step, run)[0], wanted)


def message_of(action: Callable, *types: type[BaseException]) -> str:
    try:
        action()
    except types as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def undeclared_backward(rank: int, world_size: int, run: Run) -> list[str]:
    from raydz.errors import TrainingError

    engine = start(run)
    batch = part(batch_for(1), rank, world_size)
    messages = [message_of(token_loss(engine, batch, rank, 1).backward, TrainingError)]
    messages.append(message_of(engine.step, TrainingError))
    train_step(engine, run, rank, world_size, 1)
    messages.append(message_of(lambda: engine.backward(engine(batch["ids"])), TrainingError))
    engine.destroy()
    return messages


@pytest.mark.parametrize("stage", STAGES)
def test_wrong_calls_are_refused_by_name(ranks, stage: int) -> None:
    for plain, step, vector in ranks(2).run(undeclared_backward, Run(Plain, stage=stage)):
        assert "TrainingError: backward ran without being declared" in plain and "engine.backward(loss)" in plain
        assert "TrainingError: a step has no gradients" in step
        assert "TrainingError: backward needs a scalar loss" in vector and "(6, 5, 7)" in vector


def backward_through_old_graph(rank: int, world_size: int, run: Run) -> tuple[str, dict]:
    """An old graph after a step, then training as if nothing had been."""
    engine = start(run)
    batch = part(batch_for(1), rank, world_size)
    old = token_loss(engine, batch, rank, 1)
    for step in range(1, run.steps + 1):
        train_step(engine, run, rank, world_size, step)
        message = message_of(partial(engine.backward, old, denominator=1.0), RuntimeError)
        if message == "nothing was raised":
            break
        old = token_loss(engine, batch, rank, 1)
    weights = numpy_weights(engine)
    engine.destroy()
    return message, weights


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_backward_through_a_graph_from_before_a_step_raises(ranks, stage: int, world: int) -> None:
    run = Run(Plain, stage=stage)
    results = ranks(world).run(backward_through_old_graph, run)
    assert all("RuntimeError" in text and "modified by an inplace operation" in text for text, _ in results)
    assert_close_weights(results[0][1], train_with_torch(run, world).weights)


def copies(rank: int, world_size: int, run: Run) -> dict:
    """Copies of a module after a step: refused, or whole and free of the engine."""
    from raydz.errors import LayoutError

    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    refusals = [
        message_of(engine.module.state_dict, LayoutError),
        message_of(engine.module.layers[0].state_dict, LayoutError),
        message_of(lambda: copy.deepcopy(engine.module), LayoutError),
        message_of(lambda: copy.deepcopy(engine.module.layers), LayoutError),
    ]
    with engine.gathered():
        state = {name: t.clone().numpy() for name, t in engine.module.state_dict().items()}
        clone = copy.deepcopy(engine.module)
    if rank == 0:  # nobody else takes part: a collective would hang
        before = token_loss(clone, batch_for(1), rank, 1)
        before.backward()
        torch.optim.SGD(clone.parameters(), lr=0.1).step()
        assert token_loss(clone, batch_for(1), rank, 1) < before
        clone.state_dict()
        copy.deepcopy(clone)
    train_step(engine, run, rank, world_size, 2)
    found = {"refusals": refusals, "state": state, "weights": numpy_weights(engine)}
    engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_copies_of_the_module_are_whole_or_refused(ranks, stage: int, world: int) -> None:
    run = Run(Plain, stage=stage, steps=2)
    for found in (results := ranks(world).run(copies, run)):
        if stage and world > 1:
            assert all("LayoutError: parameters are sharded and not gathered" in text for text in found["refusals"])
        else:
            assert set(found["refusals"]) == {"nothing was raised"}
        assert_close_weights(found["state"], weights_after(run, 1))
    assert_close_weights(results[0]["weights"], weights_after(run, 2))


class Fragile(Plain):
    """Fails in the middle of forward or of backward when told to."""

    def forward(self, ids, *, fails_in: str = ""):
        x = self.layers[0](self.embed(ids))
        if fails_in == "forward":
            raise ValueError("the data of this step")
        if fails_in == "backward":
            x.register_hook(fail)
        return self.head(self.norm(self.layers[1](x)))


def fail(_grad) -> None:
    raise ValueError("in backward")


def fail_and_go_on(rank: int, world_size: int, run: Run, where: str) -> dict[str, np.ndarray]:
    """In step 2, after its first micro-batch, one fails; the step is begun again."""
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    batch = batch_for(2)
    micro = part(part(batch, rank, world_size), 0, run.accumulation)
    if where == "backward":
        engine.backward(run.loss(engine, micro, rank, 2), denominator=num_labels(batch))
        engine.step()
    assert "ValueError" in message_of(
        lambda: engine.backward(engine(micro["ids"], fails_in=where).sum(), denominator=1.0), ValueError
    )
    for step in (2, 3):
        train_step(engine, run, rank, world_size, step)
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_after_an_exception_the_step_begins_again_and_is_right(ranks, stage: int, where: str) -> None:
    run = Run(Fragile, stage=stage, accumulation=2)
    weights = ranks(2).run(fail_and_go_on, run, where)[0]
    assert_close_weights(weights, train_with_torch(run, 2).weights)


def use_by_weight(rank: int, world_size: int, run: Run) -> str:
    from raydz.errors import TrainingError

    engine = start(run)
    message = message_of(lambda: train_step(engine, run, rank, world_size, 1), TrainingError)
    engine.destroy()
    return message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_weight_used_without_its_module_is_refused_by_name(ranks, stage: int) -> None:
    for message in ranks(2).run(use_by_weight, Run(ByWeight, stage=stage)):
        assert "outside the forward of the module" in message and "head.weight" in message


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_used_without_its_module_works_in_a_unit_around_its_use(ranks, stage: int) -> None:
    run = Run(ByWeight, stage=stage, units=("layers.[0-9]",))
    assert_close(ranks(2).run(train_with_engine, run)[0], train_with_torch(run, 2))


class Secret:
    """Hides a tensor."""

    def __init__(self, x) -> None:
        self.x = x


class Hiding(Plain):
    class HidingBlock(torch.nn.Linear):
        def forward(self, x):
            return Secret(super().forward(x))

    def make_block(self):
        return Hiding.HidingBlock(6, 6)

    def forward(self, ids):
        return self.head(self.layers[0](self.embed(ids)).x)


def return_no_tensor(rank: int, world_size: int, run: Run) -> str:
    from raydz.errors import LayoutError

    engine = start(run)
    message = message_of(partial(engine, batch_for(1)["ids"]), LayoutError)
    engine.destroy()
    return message


def test_a_unit_that_returns_no_tensor_is_refused_by_name(ranks) -> None:
    for message in ranks(2).run(return_no_tensor, Run(Hiding, stage=3)):
        assert "layers.0 (HidingBlock)" in message and "Secret" in message
