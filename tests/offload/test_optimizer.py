"""Masters and states in host memory: the bits are those of a training without offload, whatever else is asked for."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from raydz.errors import ConfigError, OffloadError
from raydz.offload.hosted_unit import Stage
from raydz.zero.hosted import choose_hosted
from tests.offload.training import RUN, Trained, assert_same, bits_of, engine_of, hosted, train
from tests.zero.models import Plain
from tests.zero.training import Run, batch_for, num_labels, token_loss, train_step

MODES = ("waiting", "speculative")
BF16_STATES = {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}
SECTIONS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    "plain sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
    "adagrad": {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
    "bf16 states": {"bf16": BF16_STATES},
    "bf16 moments": {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "optimizer": {"type": "Lion"}},
    "sub groups": {"zero_optimization": {"stage": 2, "sub_group_size": 7}},
    "small buckets": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 50}},
    "fp32 head": {"bf16": {"enabled": True}, "parallel": {"fp32_modules": ["head"]}},
    "cycled momentum": {
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}},
    },
}


def compare(rank: int, world_size: int, runs: list[Run], names: list[str]) -> list[str]:
    """Train each of `runs` as it is and each of `SECTIONS`, plainly and hosted; returns what was compared."""
    cases = [(str(run), run, run.config()) for run in runs]
    for name in names:
        sections = SECTIONS[name]
        config = RUN.config() | {key: value for key, value in sections.items() if key != "parallel"}
        config["parallel"] = config["parallel"] | sections.get("parallel", {})
        cases.append((name, RUN, config))
    for what, run, config in cases:
        wanted = train(rank, world_size, run, config)
        for mode in MODES:
            assert_same(train(rank, world_size, run, hosted(config, mode)), wanted, f"{what}, {mode}")
    return [what for what, _, _ in cases]


def test_one_rank_has_the_same_bits_in_every_precision(ranks):
    runs = [RUN.with_(steps=2), RUN.with_(bf16=True, accumulation=2), RUN.with_(fp16=True, steps=2)]
    ranks(1).run(compare, runs, [])


@pytest.mark.parametrize(
    "name",
    [name if name in ("lion", "bf16 states") else pytest.param(name, marks=pytest.mark.slow) for name in SECTIONS],
)
def test_every_optimizer_has_the_same_bits(ranks, name):
    ranks(1).run(compare, [], [name])


def test_two_ranks_have_the_same_bits_at_every_stage(ranks):
    ranks(2).run(compare, [RUN.with_(stage=stage, bf16=stage % 2 == 1, steps=2) for stage in range(4)], [])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_worlds_stages_and_accumulation_have_the_same_bits(ranks, world_size, stage, dtype):
    run = RUN.with_(stage=stage, bf16=dtype == "bf16", fp16=dtype == "fp16")
    runs = [run, run.with_(accumulation=2), run.with_(accumulation=2, boundary=True)]
    ranks(world_size).run(compare, runs, [])


def compare_replicas(rank: int, world_size: int) -> None:
    config = RUN.config() | {"parallel": {**RUN.config()["parallel"], "shard_size": 1}}
    config["zero_optimization"]["stage"] = 3
    wanted = train(rank, world_size, RUN, config)
    for mode in MODES:
        assert_same(train(rank, world_size, RUN, hosted(config, mode)), wanted, mode)


def test_replicas_of_a_shard_group_add_up_before_the_gradient_leaves(ranks):
    ranks(2).run(compare_replicas)


# -- clipping and speculation ----------------------------------------------------------------------------------------


def train_trying_all(rank: int, world_size: int, run: Run, mode: str) -> tuple[Trained, list[tuple[bool, float]]]:
    """With all updates tried before the norm is known, where `mode` says so; (rolled back, rate) of each step."""
    engine, seen, norms = engine_of(run, hosted(run.config(), mode)), [], []
    units = engine.optimizer.pipeline._units
    for step in range(1, run.steps + 1):
        engine.backward(token_loss(engine, batch_for(step), rank, step), denominator=num_labels(batch_for(step)))
        until = time.monotonic() + 30
        while mode == "speculative" and any(unit.stage is not Stage.TRIED for unit in units):
            assert time.monotonic() < until
            time.sleep(0.001)
        norms.append(engine.step().grad_norm)
        engine.optimizer.finish()
        offload = engine.last_report.offload
        seen.append((offload.rolled_back, offload.rollback_rate))
    trained = Trained(bits_of(engine), norms)
    engine.destroy()
    return trained, seen


@pytest.mark.parametrize(
    ("clip", "fires"), [(10.0, [False] * 4), (0.42, [True, False, True, False]), (0.1, [True] * 4)]
)
def test_undone_and_kept_updates_have_the_bits_of_waiting(clip, fires):
    run = RUN.with_(steps=4, clip=clip, bf16=True)
    wanted = train(0, 1, run, run.config())
    for mode in MODES:
        found, seen = train_trying_all(0, 1, run, mode)
        assert_same(found, wanted, mode)
        assert [fired for fired, _ in seen] == fires
        assert seen[-1][1] == pytest.approx(np.mean(fires))


def test_auto_stops_to_speculate_where_every_step_is_clipped():
    run = RUN.with_(steps=12, clip=0.1)
    engine = engine_of(run, hosted(run.config()))
    modes = []
    for step in range(1, run.steps + 1):
        report = train_step(engine, run, 0, 1, step)[1]
        modes.append(report.offload.mode)
    engine.destroy()
    assert modes[0] == "speculative" and modes[-1] == "waiting"


def test_auto_waits_where_the_budget_has_no_second_buffers():
    config = hosted(RUN.config())
    probe = engine_of(RUN, hosted(RUN.config(), "waiting"))
    held = probe.host_memory.bytes_held
    probe.destroy()
    config["parallel"]["host_memory_budget"] = held + 40_000
    engine = engine_of(RUN, config)
    assert train_step(engine, RUN, 0, 1, 1)[1].offload.mode == "waiting"
    engine.destroy()
    config["parallel"]["offload_update"] = "speculative"
    with pytest.raises(OffloadError, match="host memory") as caught:
        engine_of(RUN, config)
    assert caught.value.where == "parallel.host_memory_budget"


def spoiled_loss(model, batch, rank, step):
    loss = token_loss(model, batch, rank, step)
    return loss * float("nan") if step == 2 else loss


@pytest.mark.parametrize("mode", MODES)
def test_a_skipped_step_changes_nothing(mode):
    run = Run(Plain, loss=spoiled_loss, steps=3, clip=0.42, bf16=True)
    wanted = train(0, 1, run, run.config())
    found = train(0, 1, run, hosted(run.config(), mode))
    assert [report.skipped for report in found.reports] == [False, True, False]
    assert found.bits == wanted.bits


def train_then_discard(config: dict[str, Any]) -> dict[str, bytes]:
    engine = engine_of(RUN, config)
    train_step(engine, RUN, 0, 1, 1)
    engine.backward(token_loss(engine, batch_for(2), 0, 2))
    engine.discard_step()
    broken = token_loss(engine, batch_for(2), 0, 2)
    next(engine.module.embed.parameters()).register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(broken)
    next(engine.module.embed.parameters())._backward_hooks.clear()
    batch = batch_for(3)
    engine.verify_step(lambda model, _: token_loss(model, batch, 0, 3), denominator=num_labels(batch))
    train_step(engine, RUN, 0, 1, 3)
    bits = bits_of(engine)
    engine.destroy()
    return bits


@pytest.mark.parametrize("mode", MODES)
def test_discarded_and_verified_steps_leave_nothing_behind(mode):
    assert train_then_discard(hosted(RUN.config(), mode)) == train_then_discard(RUN.config())


# -- what is asked for -----------------------------------------------------------------------------------------------


def test_the_first_groups_stay_on_the_device_as_far_as_the_ratio_has_room():
    assert choose_hosted([10, 20, 30, 40], 1.0) == [True] * 4
    assert choose_hosted([10, 20, 30, 40], 0.7) == [False, False, True, True]
    assert choose_hosted([10, 20, 30, 40], 0.69) == [False, False, True, True]
    assert choose_hosted([40, 30, 20, 10], 0.8) == [True, True, False, True]
    assert choose_hosted([10, 20, 30, 40], 0.0) == [False] * 4


@pytest.mark.parametrize("ratio", [0.6, 0.0])
def test_ratio_keeps_states_on_the_device_and_every_bit(ratio):
    run = RUN.with_(bf16=True)
    wanted = train(0, 1, run, run.config())
    for mode in MODES:
        assert_same(train(0, 1, run, hosted(run.config(), mode, ratio=ratio)), wanted, mode)
    engines = [engine_of(run, hosted(run.config(), "waiting", ratio=r)) for r in (ratio, 1.0)]
    part, whole = (sum(s.numel for s in engine.optimizer._shapes) for engine in engines)
    for engine in engines:
        engine.destroy()
    assert part <= ratio * whole + 64


def test_kernels_run_with_the_threads_asked_for(monkeypatch):
    import raydz.zero.hosted as module

    seen = []
    monkeypatch.setattr(module, "advance", lambda optimizer, *rest: seen.append(optimizer.threads))
    config = hosted(RUN.config(), "waiting")
    config["parallel"]["offload_threads"] = 3
    engine = engine_of(RUN, config)
    train_step(engine, RUN, 0, 1, 1)
    engine.settle()  # the update is made beside training
    engine.destroy()
    assert set(seen) == {3}


def test_pin_memory_decides_what_is_asked_of_the_host(monkeypatch):
    from raydz.offload.memory import HostMemory

    asked, empty = [], HostMemory.empty
    monkeypatch.setattr(HostMemory, "empty", lambda self, *a, pinned=None: asked.append(pinned) or empty(self, *a))
    for pin in (True, False):
        engine = engine_of(RUN, hosted(RUN.config(), "waiting", pin_memory=pin))
        train_step(engine, RUN, 0, 1, 1)
        engine.destroy()
        assert set(asked) == ({True, False} if pin else {False})
        asked.clear()


def test_muon_is_refused_by_name():
    with pytest.raises(ConfigError, match="Muon"):
        engine_of(RUN, hosted(RUN.config() | {"optimizer": {"type": "Muon"}}))


def test_memory_comes_back_when_engines_end():
    for _ in range(3):
        engine = engine_of(RUN, hosted(RUN.config(), "speculative"))
        train_step(engine, RUN, 0, 1, 1)
        memory = engine.host_memory
        assert memory.bytes_held > 0
        engine.destroy()
        assert memory.bytes_held == 0


# -- failures --------------------------------------------------------------------------------------------------------


def fail(index: int, broken: int, advance, *rest: Any) -> None:
    if index == broken:
        raise RuntimeError("the kernel broke")
    advance(index, *rest)


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_update_is_a_typed_error_at_the_next_call(mode):
    engine = engine_of(RUN, hosted(RUN.config(), mode))
    train_step(engine, RUN, 0, 1, 1)
    pipeline = engine.optimizer.pipeline
    advance = pipeline._advance
    pipeline._advance = lambda index, *rest: fail(index, 2, advance, *rest)
    with pytest.raises(OffloadError, match="an update of offloaded weights failed") as caught:
        for step in (2, 3):
            train_step(engine, RUN, 0, 1, step)
    assert "the kernel broke" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)
    for call in (partial(engine, batch_for(3)["ids"]), engine.full_state_dict, engine.settle):
        with pytest.raises(OffloadError):
            call()
    engine.destroy()


def test_an_update_that_fails_before_its_step_ends_the_next_forward():
    """The device has whole weights then, of the step before."""
    engine = engine_of(RUN, hosted(RUN.config(), "speculative"))
    train_step(engine, RUN, 0, 1, 1)
    engine(batch_for(2)["ids"])  # gathers what the next forward needs
    engine.optimizer.pipeline._error = RuntimeError("the kernel broke")
    with pytest.raises(OffloadError, match="an update of offloaded weights failed"):
        engine(batch_for(2)["ids"])
    engine.destroy()


def test_weights_read_between_steps_are_the_newest():
    run = RUN.with_(bf16=True)
    engine = engine_of(run, hosted(run.config(), "waiting"))
    advance, gate = engine.optimizer.pipeline._advance, threading.Event()
    engine.optimizer.pipeline._advance = lambda *rest: (gate.wait(20), advance(*rest))
    plain = engine_of(run, run.config())
    for step in (1, 2):
        gate.clear()
        train_step(engine, run, 0, 1, step)
        train_step(plain, run, 0, 1, step)
        threading.Timer(0.2, gate.set).start()  # no update is made before the weights are asked for
        found, wanted = engine.full_state_dict(), plain.full_state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        engine.module.state_dict()
    engine.destroy()
    plain.destroy()
