"""Everything that reads or changes an engine between steps, with masters and states in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.offload.training import RUN, bits_of, engine_of, hosted
from tests.support.ranks import RankFailure
from tests.zero.training import (
    Run,
    assert_equal_bits,
    batch_for,
    num_labels,
    numpy_weights,
    part,
    token_loss,
    train_step,
)  # fmt: skip

BF16 = RUN.with_(bf16=True)


def steps(engine, run: Run, rank: int, world_size: int, numbers: range) -> None:
    for step in numbers:
        train_step(engine, run, rank, world_size, step)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def save(rank: int, world_size: int, folder: str, run: Run, config: dict[str, Any], is_async: bool) -> dict:
    """Save after two steps, train on beside it, and return the weights after two more."""
    engine = engine_of(run, config)
    steps(engine, run, rank, world_size, range(1, 3))
    saved = engine.save_checkpoint(folder, async_save=is_async)
    steps(engine, run, rank, world_size, range(3, 5))
    if is_async:
        saved.result()
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


def resume(rank: int, world_size: int, folder: str, run: Run, config: dict[str, Any]) -> dict:
    engine = engine_of(run, config)
    steps(engine, run, rank, world_size, range(7, 9))  # what is loaded replaces all of it
    engine.load_checkpoint(folder)
    steps(engine, run, rank, world_size, range(3, 5))
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


def tiers(run: Run) -> dict[str, dict[str, Any]]:
    config = run.config()
    return {
        "device": config,
        "waiting": hosted(config, "waiting"),
        "speculative": hosted(config, "speculative"),
        "half": hosted(config, "auto", ratio=0.5),
    }


@pytest.mark.parametrize(
    ("first", "then", "is_async"),
    [
        ("speculative", "device", True),
        ("device", "waiting", False),
        pytest.param("waiting", "half", False, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_another_tier_bit_for_bit(tmp_path: Path, first, then, is_async):
    run = BF16.with_(steps=4)
    wanted = save(0, 1, str(tmp_path), run, tiers(run)[first], is_async)
    assert_equal_bits(resume(0, 1, str(tmp_path), run, tiers(run)[then]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("first", ["device", "speculative"])
def test_another_stage_on_two_ranks_goes_on_bit_for_bit(ranks, tmp_path: Path, first, dtype):
    run = RUN.with_(steps=4, stage=1, bf16=dtype == "bf16", fp16=dtype == "fp16")
    wanted = ranks(2).run(save, str(tmp_path), run, tiers(run)[first], True)[0]
    other = run.with_(stage=3)
    for config in tiers(other).values():
        assert_equal_bits(ranks(2).run(resume, str(tmp_path), other, config)[0], wanted)


def test_weights_alone_are_loaded_into_masters_on_the_host(tmp_path: Path):
    found = []
    save(0, 1, str(tmp_path), BF16, BF16.config(), False)
    for config in (BF16.config(), hosted(BF16.config(), "speculative")):
        engine = engine_of(BF16, config)
        engine.load_checkpoint(str(tmp_path), weights_only=True)
        steps(engine, BF16, 0, 1, range(5, 7))
        found.append(bits_of(engine))
        engine.destroy()
    assert found[0] == found[1]


# -- averages, whole parameters, freezing ----------------------------------------------------------------------------


def look_and_change(rank: int, world_size: int, run: Run, config: dict[str, Any]) -> list[Any]:
    engine, found = engine_of(run, config, ema_decay=0.9), []
    steps(engine, run, rank, world_size, range(1, 3))
    with engine.averaged():
        found.append(numpy_weights(engine))
    with engine.gathered():
        found.append([p.detach().float().numpy().tobytes() for p in engine.module.parameters()])
    with engine.gathered("head*", modify=True), torch.no_grad():
        engine.module.head.weight.mul_(1.0 + 2.0**-20)
    steps(engine, run, rank, world_size, range(3, 4))
    found.append(numpy_weights(engine))
    state = engine.full_state_dict()
    engine.load_full_state_dict({name: values * 0.5 for name, values in state.items()})
    engine.set_trainable("layers.0*", False)
    steps(engine, run, rank, world_size, range(4, 6))
    engine.set_trainable("layers.0*", True)
    steps(engine, run, rank, world_size, range(6, 8))
    found += [numpy_weights(engine), bits_of(engine)]
    engine.destroy()
    return found


def compare(rank: int, world_size: int, run: Run, mode: str) -> None:
    wanted = look_and_change(rank, world_size, run, run.config())
    found = look_and_change(rank, world_size, run, hosted(run.config(), mode))
    for mine, theirs in zip(found, wanted, strict=True):
        if isinstance(theirs, dict) and theirs and isinstance(next(iter(theirs.values())), np.ndarray):
            assert_equal_bits(mine, theirs)
        else:
            assert mine == theirs


@pytest.mark.parametrize("mode", [pytest.param("waiting", marks=pytest.mark.slow), "speculative"])
def test_averages_exports_changes_and_freezing_see_the_newest_weights(ranks, mode):
    ranks(1).run(compare, BF16, mode)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_the_same_on_two_ranks(ranks, stage):
    ranks(2).run(compare, RUN.with_(stage=stage), "speculative")


# -- ranks that differ -----------------------------------------------------------------------------------------------


def train_unevenly(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, bytes]:
    engine = engine_of(RUN, config)
    with engine.join():
        for step in range(1, 3 + rank):
            batch = part(batch_for(step), rank, world_size)
            engine.backward(token_loss(engine, batch, rank, step) / num_labels(batch))
            engine.step()
    bits = bits_of(engine)
    engine.destroy()
    return bits


def compare_uneven(rank: int, world_size: int) -> None:
    run = RUN.with_(stage=2)
    wanted = train_unevenly(rank, world_size, run.config())
    for mode in ("waiting", "speculative"):
        assert train_unevenly(rank, world_size, hosted(run.config(), mode)) == wanted


def test_ranks_with_unequally_many_batches_have_the_same_bits(ranks):
    ranks(2).run(compare_uneven)


def fail_on_one_rank(rank: int, world_size: int) -> None:
    run = RUN.with_(stage=2)
    engine = engine_of(run, hosted(run.config(), "waiting"))
    steps(engine, run, rank, world_size, range(1, 2))
    if rank == 1:
        engine.optimizer.pipeline._advance = lambda *_: 1 / 0
    steps(engine, run, rank, world_size, range(2, 5))


def test_a_failed_update_on_one_rank_ends_all_of_them(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(fail_on_one_rank)
    assert "an update of offloaded weights failed" in str(caught.value) and "division by zero" in str(caught.value)


def test_an_export_has_the_bytes_of_one_without_offload(tmp_path: Path):
    files = []
    for name, config in (("plain", BF16.config()), ("hosted", hosted(BF16.config()))):
        engine = engine_of(BF16, config)
        steps(engine, BF16, 0, 1, range(1, 3))
        engine.save_16bit_model(tmp_path / name)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
        engine.destroy()
    assert files[0] == files[1]
