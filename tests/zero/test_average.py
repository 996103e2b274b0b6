"""Averaged weights: against an average of whole weights that numpy keeps, over stages, precisions and checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raydz.errors import ConfigError
from tests.zero.models import Plain
from tests.zero.training import (
    Run,
    batch_for,
    build,
    num_labels,
    numpy_weights,
    owned_bytes,
    part,
    sum_loss,
    train_step,
)

DECAY = 0.75


def start(run: Run, **options):
    import raydz.engine

    return raydz.engine.initialize(build(run), run.config(), device="cpu", **options)


def reference(weights: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The average after each of `weights` but the first, which it starts from, in fp64."""
    average = {name: value.astype(np.float64) for name, value in weights[0].items()}
    for step in weights[1:]:
        average = {name: DECAY * value + (1 - DECAY) * step[name] for name, value in average.items()}
    return average


def train_and_look(rank: int, world_size: int, run: Run) -> dict:
    engine = start(run, ema_decay=DECAY)
    weights = [numpy_weights(engine)]
    for step in range(1, run.steps + 1):
        train_step(engine, run, rank, world_size, step)
        weights.append(numpy_weights(engine))
    batch = part(batch_for(9), rank, world_size)
    before = owned_bytes(engine)
    with engine.averaged():
        average = numpy_weights(engine)
        with torch.no_grad():
            loss = float(run.loss(engine, batch, rank, 9))
    unchanged = before == owned_bytes(engine)
    train_step(engine, run, rank, world_size, run.steps + 1)
    found = {
        "weights": weights,
        "average": average,
        "loss": loss,
        "unchanged": unchanged,
        "after": numpy_weights(engine),
    }
    engine.destroy()
    return found


def train_without(rank: int, world_size: int, run: Run) -> dict[str, np.ndarray]:
    engine = start(run)
    for step in range(1, run.steps + 2):
        train_step(engine, run, rank, world_size, step)
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_average_follows_the_masters_and_disturbs_nothing(ranks, stage: int, bf16: bool) -> None:
    run = Run(Plain, stage=stage, bf16=bf16)
    found = ranks(2).run(train_and_look, run)
    wanted = reference(found[0]["weights"])
    for name, value in wanted.items():
        np.testing.assert_allclose(found[0]["average"][name], value, rtol=1e-6, atol=1e-7, err_msg=name)
        assert not np.array_equal(found[0]["average"][name], found[0]["weights"][-1][name]), name
    assert all(one["unchanged"] for one in found)
    straight = ranks(2).run(train_without, run)[0]
    assert all(straight[name].tobytes() == value.tobytes() for name, value in found[0]["after"].items())


def test_forward_within_the_block_is_the_averages(ranks) -> None:
    run = Run(Plain, stage=3)
    found = ranks(2).run(train_and_look, run)
    model = build(run)
    names = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in reference(found[0]["weights"]).items():
            names[name].copy_(torch.from_numpy(value))
        for rank, one in enumerate(found):
            batch = part(batch_for(9), rank, 2)
            assert one["loss"] == pytest.approx(float(sum_loss(model(batch["ids"]), batch)), rel=1e-5)
    assert num_labels(batch_for(9)) > 0


def save(rank: int, world_size: int, run: Run, folder: str) -> dict[str, np.ndarray]:
    engine = start(run, ema_decay=DECAY)
    for step in range(1, run.steps + 1):
        train_step(engine, run, rank, world_size, step)
    engine.save_checkpoint(folder, "a")
    with engine.averaged():
        average = numpy_weights(engine)
    engine.destroy()
    return average


def load(rank: int, world_size: int, run: Run, folder: str, options: dict) -> dict[str, np.ndarray]:
    engine = start(run, **options)
    engine.load_checkpoint(folder, "a")
    if not options:
        weights = numpy_weights(engine)
    else:
        with engine.averaged():
            weights = numpy_weights(engine)
    engine.destroy()
    return weights


def test_checkpoint_brings_it_back_at_another_stage_and_world_size(ranks, tmp_path) -> None:
    run = Run(Plain, stage=3)
    saved = ranks(2).run(save, run, str(tmp_path))[0]
    loaded = ranks(1).run(load, run.with_(stage=1), str(tmp_path), {"ema_decay": DECAY})[0]
    weights = ranks(1).run(load, run.with_(stage=1), str(tmp_path), {})[0]
    assert all(loaded[name].tobytes() == value.tobytes() for name, value in saved.items())
    assert any(weights[name].tobytes() != value.tobytes() for name, value in saved.items())


def save_without(rank: int, world_size: int, run: Run, folder: str) -> dict[str, np.ndarray]:
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    engine.save_checkpoint(folder, "a")
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


def test_a_checkpoint_without_one_starts_it_at_the_loaded_weights(ranks, tmp_path) -> None:
    run = Run(Plain, stage=2)
    saved = ranks(1).run(save_without, run, str(tmp_path))[0]
    loaded = ranks(1).run(load, run, str(tmp_path), {"ema_decay": DECAY})[0]
    assert all(loaded[name].tobytes() == value.tobytes() for name, value in saved.items())


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_an_impossible_decay_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match="ema_decay"):
        start(Run(Plain), ema_decay=decay)


def test_an_engine_without_an_average_says_so() -> None:
    engine = start(Run(Plain))
    with pytest.raises(ConfigError, match="no average"), engine.averaged():
        raise AssertionError("unreachable")
    engine.destroy()
