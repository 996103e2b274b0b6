"""fp16 with its loss scale, modules of another dtype, frozen parameters that keep theirs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raydz.errors import ConfigError, TrainingError
from raydz.optim import LossScale, LossScaleRule
from raydz.tracking.metrics import check_names
from raydz.train.figures import StepWatch
from raydz.zero.precision import PrecisionPlan, map_tensors
from tests.zero.halves import train_in_halves
from tests.zero.models import WIDTH, Adapted, Hidden, Pair, Plain, Poisoned
from tests.zero.test_skip import bad_on_every_step
from tests.zero.training import (
    Outcome,
    Run,
    assert_equal_bits,
    batch_for,
    build,
    num_labels,
    numpy_weights,
    owned_bytes,
    start,
    token_loss,
    torch_optimizer,
    train_step,
)  # fmt: skip

STAGES = range(4)
FP16 = {"enabled": True, "initial_scale_power": 10}
# A master that differs in its last bit may round to another fp16 weight, 2^-11 off; the next gradients move with it.
# With eps 1e-4 and lr 1e-2 that moves a weight by less than 1e-2 of lr in three steps.
TOLERANCE = 1e-4


def train(rank: int, world_size: int, run: Run, sections: dict) -> Outcome:
    engine, losses, norms = start(run, **sections), [], []
    for step in range(1, run.steps + 1):
        local, report = train_step(engine, run, rank, world_size, step)
        total = sum(row[0] for row in engine.comms.world.all_gather_values([local]))
        losses.append(total / num_labels(batch_for(step)))
        norms.append(report.grad_norm)
    outcome = Outcome(numpy_weights(engine), losses, norms)
    engine.destroy()
    return outcome


def assert_near(found: Outcome, wanted: Outcome) -> None:
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-3)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=5e-3)
    for name, weights in wanted.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_fp16_trains_as_plain_torch_with_fp32_masters_and_a_scaled_loss(ranks, stage: int, world: int) -> None:
    run = Run(Plain, stage=stage)
    wanted = train_in_halves(run, world, torch.float16, scale=2.0**10)
    assert_near(ranks(world).run(train, run, {"fp16": FP16})[0], wanted)


def test_fp16_gives_equal_bits_at_every_stage(ranks) -> None:
    outcomes = [ranks(2).run(train, Run(Plain, stage=stage), {"fp16": FP16})[0] for stage in STAGES]
    for other in outcomes[1:]:
        assert other.losses == outcomes[0].losses and other.norms == outcomes[0].norms
        assert_equal_bits(other.weights, outcomes[0].weights)


def test_the_scale_saves_gradients_that_fp16_would_lose(ranks) -> None:
    run = Run(Plain, tiny_loss, steps=1)
    lost, saved = (
        ranks(1).run(train, run, {"fp16": FP16 | {"loss_scale": scale}})[0].norms[0] for scale in (1.0, 2.0**20)
    )
    exact = train_in_halves(run.with_(loss=tiny_loss), 1, torch.float16, scale=2.0**20).norms[0]
    assert abs(saved / exact - 1) < 1e-3
    assert lost < 0.5 * exact


def tiny_loss(model, batch: dict[str, Tensor], rank: int, step: int) -> Tensor:
    return token_loss(model, batch, rank, step) * 2.0**-20


def fall_and_train(rank: int, world_size: int, run: Run, fp16: dict) -> list[tuple]:
    engine, rows = start(run, fp16=fp16), []
    for step in range(1, 13):
        before = owned_bytes(engine)
        _, report = train_step(engine, run, rank, world_size, step)
        rows.append((report.loss_scale, report.skipped, owned_bytes(engine) == before, engine.loss_scale.scale))
    engine.destroy()
    return rows


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_skips_the_step_on_every_rank_and_lowers_the_scale_until_it_fits(ranks, stage: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 2, "loss_scale_window": 3}
    first, second = ranks(2).run(fall_and_train, Run(Plain, stage=stage), fp16)
    assert first == second
    skipped = [row[1] for row in first]
    assert 2 < sum(skipped) < 10 and skipped[0]
    state = LossScale.start(LossScaleRule(window=3, hysteresis=2), 2.0**22)
    for used, is_skipped, is_unchanged, after in first:
        assert used == state.scale
        assert is_unchanged == is_skipped
        state = state.after(overflowed=is_skipped)
        assert after == state.scale


def overflow_until_the_end(rank: int, world_size: int, run: Run, fp16: dict) -> tuple[int, float, str]:
    engine, message = start(run, fp16=fp16), ""
    for step in range(1, 20):
        try:
            train_step(engine, run, rank, world_size, step)
        except TrainingError as error:
            message = str(error)
            break
    scale = engine.loss_scale.scale
    engine.destroy()
    return step, scale, message


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_overflows_at_the_lowest_scale_end_training_and_name_the_parameter(ranks, kind: str) -> None:
    run = Run(Poisoned, bad_on_every_step, stage=3, max_skipped=3)
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "min_loss_scale": 2.0}
    last_step, scale = (6, 2.0) if kind == "dynamic" else (3, 64.0)
    if kind == "static":
        fp16["loss_scale"] = 64.0
    for step, lowest, message in ranks(2).run(overflow_until_the_end, run, fp16):
        assert (step, lowest) == (last_step, scale)  # dynamic: 16, 8, 4 could fall, then three times 2
        assert "where:  spot\n" in message and f"loss scale {scale:g}" in message


def save_and_go_on(rank: int, world_size: int, folder: str) -> tuple:
    run = Run(Plain, stage=3)
    fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 2, "loss_scale_window": 2}
    engine = start(run, fp16=fp16)
    for step in range(1, 6):
        train_step(engine, run, rank, world_size, step)
    engine.save_checkpoint(folder)
    other = start(run.with_(stage=1), fp16=fp16)
    other.load_checkpoint(folder)
    states = engine.loss_scale, other.loss_scale
    for step in range(6, 12):
        for one in (engine, other):
            train_step(one, run, rank, world_size, step)
    weights = numpy_weights(engine), numpy_weights(other)
    counts = engine.global_steps, other.global_steps
    for one in (engine, other):
        one.destroy()
    return states, weights, counts


def test_a_checkpoint_brings_scale_and_masters_to_another_stage(ranks, tmp_path) -> None:
    for states, weights, counts in ranks(2).run(save_and_go_on, str(tmp_path)):
        assert states[0] == states[1] and states[0].scale != 2.0**18
        assert counts[0] == counts[1] < 11
        assert_equal_bits(weights[1], weights[0])


def test_every_key_of_the_section_reaches_the_scale() -> None:
    keys = {"initial_scale_power": 3, "loss_scale_window": 7, "hysteresis": 4, "min_loss_scale": 0.5}
    fp16 = {"enabled": True, "consecutive_hysteresis": True, **keys}
    engine = start(Run(Plain), fp16=fp16)
    rule = LossScaleRule(7, 4, refills_each_step=True, minimum=0.5)
    assert engine.loss_scale == LossScale(rule, 8.0, overflows_left=4)
    assert start(Run(Plain), fp16=fp16 | {"loss_scale": 3.0}).loss_scale.after(overflowed=True).scale == 3.0
    assert start(Run(Plain)).loss_scale is None


def test_the_scale_is_a_metric_of_every_fp16_step() -> None:
    for sections, wanted in (({"fp16": FP16}, 2.0**10), ({}, None)):
        engine = start(Run(Plain), **sections)
        watch = StepWatch(engine, None)
        watch.start()
        _, report = train_step(engine, Run(Plain), 0, 1, 1)
        figures = watch.stop(report, 10)
        check_names(figures)
        assert figures.get("loss_scale") == wanted


@pytest.mark.parametrize("kind", ["SGD", "Lion", "Adagrad", "Muon"])
def test_other_optimizers_keep_separate_masters_too(ranks, kind: str) -> None:
    """Many steps smaller than fp16 can show: without masters nothing would move."""
    for moved in ranks(2).run(creep, kind):
        assert 0 < moved < 2e-3


def creep(rank: int, world_size: int, kind: str) -> float:
    run = Run(Plain, stage=3, clip=0.0)
    engine = start(run, fp16=FP16, optimizer={"type": kind, "params": {"lr": 1e-5}})
    before = engine.full_state_dict()
    for step in range(1, 4):
        _, report = train_step(engine, run, rank, world_size, step)
        assert not report.skipped
    after = engine.full_state_dict()
    changes = [float((after[name] - before[name]).abs().max()) for name in before] if rank == 0 else [1e-5]
    engine.destroy()
    return min(changes)


@pytest.mark.parametrize("sections", [{"fp16": {"enabled": True}, "bf16": {"enabled": True}}])
def test_two_16_bit_dtypes_at_once_are_refused(sections: dict) -> None:
    with pytest.raises(ConfigError, match="both enabled"):
        start(Run(Plain), **sections)


# -- exceptions --------------------------------------------------------------------------------------------------


def dtypes_seen(rank: int, world_size: int, run: Run, sections: dict) -> dict:
    engine, seen = start(run, **sections), {}

    def look(name: str):
        def hook(module: nn.Module, args: tuple) -> None:
            seen[name] = (args[0].dtype, next(module.parameters()).dtype)

        return hook

    for name, module in engine.module.named_modules():
        if name in ("norm", "layers.0.up", "layers.1.up", "head"):
            module.register_forward_pre_hook(look(name))
    engine.module.norm.register_forward_hook(lambda module, args, output: seen.update(out=output.dtype))
    train_step(engine, run, rank, world_size, 1)
    engine.destroy()
    return seen


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_fp32_modules_compute_in_fp32_and_cast_at_their_border(ranks, stage: int, dtype: str) -> None:
    half, full = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], torch.float32
    sections = {dtype: {"enabled": True}, "parallel": {"fp32_modules": ["norm", "layers.0"]}}
    for seen in ranks(2).run(dtypes_seen, Run(Plain, stage=stage), sections):
        assert seen == {
            "layers.0.up": (full, full), "layers.1.up": (half, half), "norm": (full, full), "head": (half, half),
            "out": half,
        }  # fmt: skip


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_with_fp32_exceptions_trains_as_plain_torch_does(ranks, stage: int) -> None:
    run, exceptions = Run(Plain, stage=stage, steps=2), ("norm", "layers.0")
    wanted = train_in_halves(run, 2, torch.bfloat16, fp32_modules=exceptions)
    sections = {"bf16": {"enabled": True}, "parallel": {"fp32_modules": list(exceptions)}}
    found = ranks(2).run(train, run, sections)[0]
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-3)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=1e-2)
    for name in ("norm.weight", "layers.0.up.weight", "head.weight"):
        np.testing.assert_allclose(found.weights[name], wanted.weights[name], rtol=0, atol=1e-3)


def test_a_pattern_of_fp32_modules_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.fp32_modules"):
        PrecisionPlan.of(Plain(), torch.bfloat16, ["router"])


def test_a_tied_weight_cannot_have_two_dtypes() -> None:
    with pytest.raises(ConfigError, match="two dtypes"):
        start(Run(tied, bf16=True), parallel={"fp32_modules": ["head"]})


def tied() -> nn.Module:
    return Plain(tied=True)


class LowRank(Plain):
    """A frozen bf16 base with fp32 adapters, cast by hand as LoRA code does; and a frozen table of small integers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.layers:
            block.to(torch.bfloat16).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in self.layers)
        table = torch.arange(WIDTH, dtype=torch.int8)
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.table * 0.125
        for block, adapter in zip(self.layers, self.adapters, strict=True):
            x = x + block(x.to(torch.bfloat16)).float() + adapter(x)
        return self.head(self.norm(x))


def train_low_rank(rank: int, world_size: int, run: Run, folder: str) -> dict[str, Tensor]:
    engine = start(run)
    for step in (1, 2):
        train_step(engine, run, rank, world_size, step)
    engine.save_checkpoint(folder)
    engine.destroy()
    other = start(run)
    other.load_checkpoint(folder)
    state = other.full_state_dict()
    other.destroy()
    return state


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters_keep_their_dtype_through_training_saving_and_export(ranks, stage: int, tmp_path) -> None:
    run = Run(LowRank, stage=stage)
    found = ranks(2).run(train_low_rank, run, str(tmp_path))[0]
    plain = build(run)
    optimizer = torch_optimizer(plain)
    for step in (1, 2):
        batch = batch_for(step)
        (run.loss(plain, batch, 0, step) / num_labels(batch)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        assert found[name].dtype == parameter.dtype, name
        if parameter.requires_grad:
            torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-4)
        else:
            assert torch.equal(found[name], parameter.detach()), name


def test_frozen_fp32_takes_the_compute_dtype_unless_its_module_is_an_exception(ranks) -> None:
    assert ranks(1).run(frozen_dtypes) == [(torch.bfloat16, torch.float32)]


def frozen_dtypes(rank: int, world_size: int) -> tuple[torch.dtype, torch.dtype]:
    engine = start(Run(Adapted, bf16=True), parallel={"fp32_modules": ["layers.1"]})
    found = engine.module.layers[0].up.weight.dtype, engine.module.layers[1].up.weight.dtype
    engine.destroy()
    return found


def test_tensors_are_mapped_in_containers_of_every_kind() -> None:
    one = torch.ones(2)
    value = {"a": (one, [one, "text"]), "b": Hidden(one), "c": Pair(one, one), "d": math.pi}
    mapped = map_tensors(value, torch.Tensor.double)
    assert type(mapped["b"]) is Hidden and mapped["b"].note == "no tensor" and mapped["d"] == math.pi
    assert type(mapped["c"]) is Pair
    tensors = [mapped["a"][0], mapped["a"][1][0], mapped["b"].x, *mapped["c"]]
    assert all(t.dtype == torch.float64 for t in tensors)
    assert value["b"].x is one and value["a"][1][0] is one
