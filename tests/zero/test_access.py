"""Whole parameters seen, changed, loaded, frozen and unfrozen through the engine."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from torch import nn

from raydz.errors import ConfigError, LayoutError, TrainingError
from tests.zero.models import Adapted, Plain
from tests.zero.training import (
    BETAS,
    DECAY,
    EPS,
    LR,
    Run,
    assert_close_weights,
    assert_equal_bits,
    batch_for,
    build,
    num_labels,
    numpy_weights,
    part,
    start,
    train_step,
)  # fmt: skip

STAGES = range(4)


def error_of(action) -> str:
    try:
        action()
    except (ConfigError, LayoutError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- seeing and changing -----------------------------------------------------------------------------------------


def see_some(rank: int, world_size: int, run: Run) -> tuple[bool, bool]:
    engine = start(run)
    with engine.gathered("layers.1"):
        parameters = dict(engine.module.named_parameters())
        shown = bool(parameters["layers.1.up.weight"].isfinite().all())
        hidden = bool(parameters["layers.0.up.weight"].isnan().all())
    engine.destroy()
    return shown, hidden


def test_only_what_is_asked_for_is_gathered(ranks) -> None:
    assert ranks(2).run(see_some, Run(Plain, stage=3)) == [(True, True)] * 2


def change(rank: int, world_size: int, run: Run) -> dict[str, np.ndarray]:
    """Rank 0's values count, whatever the others write; what is not touched keeps every bit."""
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    before = numpy_weights(engine)
    with engine.gathered(["layers.0.*", "head"], modify=True), torch.no_grad():
        up, head = engine.module.layers[0].up, engine.module.head
        up.weight[1] = 0.1 if rank == 0 else 99.0
        up.bias.data = torch.full_like(up.bias, 0.3 + rank)
        head.weight.mul_(1 + 2.0**-20)
        engine.module.layers[0].down.weight[-1] = 0.7 + rank  # owned by the last rank
    after = numpy_weights(engine)
    with engine.gathered():
        shown = {name: p.detach().float().numpy().copy() for name, p in engine.module.named_parameters()}
    train_step(engine, run, rank, world_size, 2)
    engine.destroy()
    return {"before": before, "after": after, "shown": shown}


@pytest.mark.parametrize("half", ["", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_changes_reach_the_masters_exactly(ranks, stage: int, half: str) -> None:
    first, second = ranks(2).run(changing(half), Run(Plain, stage=stage))
    wanted = first["before"] | {"layers.0.up.bias": np.full(10, 0.3, np.float32)}
    wanted["layers.0.up.weight"] = wanted["layers.0.up.weight"].copy()
    wanted["layers.0.up.weight"][1] = np.float32(0.1)
    wanted["layers.0.down.weight"] = wanted["layers.0.down.weight"].copy()
    wanted["layers.0.down.weight"][-1] = np.float32(0.7)
    wanted["head.weight"] = wanted["head.weight"] * np.float32(1 + 2.0**-20)
    assert_equal_bits(first["after"], wanted)
    assert_equal_bits(second["shown"], first["shown"])
    precision = {"": 1e-9, "bf16": 2.0**-8, "fp16": 2.0**-10}[half]
    for name, values in wanted.items():
        np.testing.assert_allclose(first["shown"][name], values, rtol=precision, atol=1e-7)


def changing(half: str):
    return {"": change, "bf16": change_bf16, "fp16": change_fp16}[half]


def change_bf16(rank: int, world_size: int, run: Run) -> dict[str, np.ndarray]:
    return change(rank, world_size, run.with_(bf16=True))


def change_fp16(rank: int, world_size: int, run: Run) -> dict[str, np.ndarray]:
    return change(rank, world_size, run.with_(fp16=True))


def fail_within(rank: int, world_size: int, run: Run) -> dict[str, object]:
    engine = start(run)
    before = numpy_weights(engine)
    found: dict[str, object] = {}

    def raise_within() -> None:
        with engine.gathered(modify=True), torch.no_grad():
            engine.module.head.weight.zero_()
            raise TrainingError("of the caller")

    def forward_within() -> None:
        with engine.gathered(modify=True):
            engine(batch_for(1)["ids"])

    def reshape_within() -> None:
        with engine.gathered(modify=True):
            engine.module.head.weight.data = torch.zeros(3)

    found["errors"] = [error_of(action) for action in (raise_within, forward_within, reshape_within)]
    found["unknown"] = error_of(lambda: engine.gathered("nothing.*").__enter__())
    found["unchanged"] = all(np.array_equal(before[name], value) for name, value in numpy_weights(engine).items())
    _, report = train_step(engine, run, rank, world_size, 1)
    found["trains"] = not report.skipped
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_block_that_fails_changes_nothing(ranks, stage: int) -> None:
    for found in ranks(2).run(fail_within, Run(Plain, stage=stage)):
        assert found["unchanged"] and found["trains"]
        texts = ("of the caller", "a forward while parameters are being changed", "was given another shape")
        for error, text in zip(found["errors"], texts, strict=True):
            assert text in error
        assert "ConfigError: no parameter has this name" in found["unknown"]


def hold_arrays(rank: int, world_size: int, run: Run) -> tuple[bool, bool]:
    engine = start(run)
    with engine.gathered():
        arrays = {name: p.detach().numpy() for name, p in engine.module.named_parameters()}
        values = {name: array.copy() for name, array in arrays.items()}
    reports = [train_step(engine, run, rank, world_size, step)[1] for step in (1, 2)]
    same = all(np.array_equal(arrays[name], values[name]) for name in values if name.startswith("layers"))
    engine.destroy()
    return same, all(not report.skipped for report in reports)


def test_a_numpy_array_held_past_the_block_keeps_its_values_and_breaks_no_release(ranks) -> None:
    assert ranks(2).run(hold_arrays, Run(Plain, stage=3)) == [(True, True)] * 2


# -- loading -----------------------------------------------------------------------------------------------------


def load(rank: int, world_size: int, run: Run) -> dict[str, object]:
    engine = start(run, parallel={"gradient_reduction": "micro_batch"})
    torch.manual_seed(5 + rank)
    other = Plain().state_dict()
    found: dict[str, object] = {"refused": error_of(lambda: engine.module.load_state_dict(other))}
    broken = {k: v for k, v in other.items() if k != "head.weight"} | {"extra": torch.ones(1)}
    found["strict"] = error_of(lambda: engine.load_full_state_dict(broken if rank == 0 else None))
    wrong = other | {"head.weight": torch.ones(3)}
    found["shape"] = error_of(lambda: engine.load_full_state_dict(wrong if rank == 0 else None))
    engine.load_full_state_dict(other if rank == 0 else None)
    found["loaded"] = numpy_weights(engine)
    engine.load_full_state_dict({"norm.bias": torch.full((6,), 0.1)} if rank == 0 else {}, strict=False)
    found["part"] = numpy_weights(engine)
    with engine.gathered(modify=True):
        engine.module.load_state_dict(other)
    found["within"] = numpy_weights(engine)
    train_step(engine, run, rank, world_size, 1)
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "half"), [(0, "bf16"), (1, ""), (2, "fp16"), (3, ""), (3, "bf16")])
def test_a_state_is_loaded_through_the_engine_and_refused_on_the_module(ranks, stage: int, half: str) -> None:
    run = Run(Plain, stage=stage, bf16=half == "bf16", fp16=half == "fp16")
    torch.manual_seed(5)
    wanted = {name: t.numpy().copy() for name, t in Plain().state_dict().items()}
    found = ranks(2).run(load, run)[0]
    assert "LayoutError" in found["refused"] and "load_full_state_dict" in found["refused"]
    assert "head.weight" in found["strict"] and "extra" in found["strict"]
    assert "another shape" in found["shape"]
    assert_equal_bits(found["loaded"], wanted)
    assert_equal_bits(found["part"], wanted | {"norm.bias": np.full(6, 0.1, np.float32)})
    assert_equal_bits(found["within"], wanted)


# -- freezing ----------------------------------------------------------------------------------------------------

CHANGES = {2: ("layers.0", False), 4: ("layers.0", True), 5: ("*.down.weight", False)}
"""Before these steps."""


def train_and_freeze(rank: int, world_size: int, run: Run, folder: str) -> dict[str, object]:
    engine = start(run)
    for step in range(1, 7):
        if step in CHANGES:
            engine.set_trainable(*CHANGES[step])
        train_step(engine, run, rank, world_size, step)
        if step == 3:
            names = sorted(spec.name for group in engine.optimizer.groups for spec in group.specs)
    found = {"weights": numpy_weights(engine), "trained": names}
    engine.save_checkpoint(folder)
    other = start(run.with_(stage=3 - run.stage))
    other.set_trainable("*.down.weight", False)
    other.load_checkpoint(folder)
    for one in (engine, other):
        train_step(one, run, rank, world_size, 7)
    found["continued"] = numpy_weights(engine), numpy_weights(other)
    for one in (engine, other):
        one.destroy()
    return found


class ByHand:
    """AdamW from its formula: the step count is the run's, states of what is newly trained are zero."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.states = model, {}

    def step(self, step: int, lr: float) -> None:
        for name, p in self.model.named_parameters():
            if not p.requires_grad:
                self.states.pop(name, None)
                continue
            m, v = self.states.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
            m.mul_(BETAS[0]).add_(p.grad, alpha=1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(p.grad, p.grad, value=1 - BETAS[1])
            mean, square = m / (1 - BETAS[0] ** step), v / (1 - BETAS[1] ** step)
            p.data.mul_(1 - lr * (DECAY if p.dim() > 1 else 0)).sub_(lr * mean / (square.sqrt() + EPS))


def freeze_by_hand(run: Run) -> dict[str, np.ndarray]:
    model = build(run)
    optimizer = ByHand(model)
    for step in range(1, 7):
        if step in CHANGES:
            pattern, trainable = CHANGES[step]
            for name, p in model.named_parameters():
                if fnmatchcase(name, pattern) or name.startswith(pattern + "."):
                    p.requires_grad_(trainable)
        batch = batch_for(step)
        model.zero_grad()
        (run.loss(model, batch, 0, step) / num_labels(batch)).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], run.clip)
        optimizer.step(step, LR)
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_freezing_and_unfreezing_between_steps(ranks, stage: int, world: int, tmp_path) -> None:
    run = Run(Plain, stage=stage)
    found = ranks(world).run(train_and_freeze, run, str(tmp_path))[0]
    assert not any(name.startswith("layers.0") for name in found["trained"]) and "head.weight" in found["trained"]
    assert_close_weights(found["weights"], freeze_by_hand(run))
    assert_equal_bits(found["continued"][1], found["continued"][0])


def refuse_freezing(rank: int, world_size: int, run: Run) -> list[str]:
    engine = start(run)
    engine.backward(run.loss(engine, part(part(batch_for(1), rank, world_size), 0, 2), rank, 1))
    engine.step()
    errors = [error_of(lambda: engine.set_trainable("head", False)), error_of(lambda: engine.load_full_state_dict({}))]
    engine.destroy()
    return errors


def test_within_accumulation_nothing_is_frozen_or_loaded(ranks) -> None:
    for errors in ranks(2).run(refuse_freezing, Run(Plain, stage=2, accumulation=2)):
        assert all("within accumulation" in error for error in errors)


def unfreeze_all(rank: int, world_size: int, run: Run) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], bool]:
    """A frozen base in bf16 is trained later; Parameters stay the same objects."""
    engine = start(run)
    held = dict(engine.module.named_parameters())
    train_step(engine, run, rank, world_size, 1)
    before = {k: v.float().numpy().copy() for k, v in engine.full_state_dict().items()}
    engine.set_trainable("layers.*", True)
    after = numpy_weights(engine)
    train_step(engine, run, rank, world_size, 2)
    moved = numpy_weights(engine)
    same = all(p is held[name] for name, p in engine.module.named_parameters())
    has_moved = rank > 0 or all(not np.array_equal(moved[k], after[k]) for k in after)
    engine.destroy()
    return before, after, same and has_moved


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_base_in_bf16_begins_training_at_its_values(ranks, stage: int) -> None:
    for before, after, is_right in ranks(2).run(unfreeze_all, Run(Adapted, stage=stage, bf16=True)):
        assert_equal_bits(after, before)
        assert is_right
