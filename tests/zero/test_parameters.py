"""Parameters of every kind: odd sizes, frozen, tied, foreign; and where their first values come from."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.zero.models import WIDTH, Adapted, OddSizes, Plain, Scaled, TiedWithBias
from tests.zero.training import (
    Run,
    assert_close,
    assert_equal_bits,
    build,
    numpy_weights,
    start,
    train_step,
    train_with_engine,
    train_with_torch,
)  # fmt: skip

STAGES, WORLDS = range(4), (1, 2, 3, 4)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_sizes_of_zero_one_three_and_primes_train_like_any_other(ranks, stage: int, world: int) -> None:
    run = Run(OddSizes, stage=stage, accumulation=2 if world < 4 else 1)
    assert_close(ranks(world).run(train_with_engine, run)[0], train_with_torch(run, world))


@pytest.mark.parametrize("persistence", [0, 1000])
@pytest.mark.parametrize("bucket", [1, 70])
def test_odd_sizes_in_buckets_of_their_own(ranks, bucket: int, persistence: int) -> None:
    zero = (("reduce_bucket_size", bucket), ("stage3_param_persistence_threshold", persistence))
    run = Run(OddSizes, stage=3, zero=zero)
    assert_close(ranks(3).run(train_with_engine, run)[0], train_with_torch(run, 3))


@pytest.mark.parametrize("recompute", ["", "non_reentrant"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_pass_through_frozen_weights_below_the_trained_part(ranks, stage, world, recompute) -> None:
    run = Run(partial(Adapted, recompute=recompute), stage=stage)
    outcome = ranks(world).run(train_with_engine, run)[0]
    assert_close(outcome, train_with_torch(run, world))
    start = {name: p.detach().numpy() for name, p in build(run).named_parameters() if not p.requires_grad}
    assert len(start) == 6
    assert_equal_bits({name: outcome.weights[name] for name in start}, start)


def sizes_of_states(rank: int, world_size: int, run: Run) -> tuple[list[str], int]:
    engine = start(run)
    names = [spec.name for group in engine.optimizer.groups for spec in group.specs]
    numel = sum(state["exp_avg"].numel() for state in engine.optimizer.states)
    engine.destroy()
    return names, numel


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_have_no_optimizer_state(ranks, stage: int) -> None:
    trained = {name: p.numel() for name, p in Adapted().named_parameters() if p.requires_grad}
    found = ranks(2).run(sizes_of_states, Run(Adapted, stage=stage))
    assert all(sorted(names) == sorted(trained) for names, _ in found)
    padding = 32 * len(trained)  # at most: 16 elements of alignment on each of two ranks
    total = sum(numel for _, numel in found) / (2 if stage == 0 else 1)
    assert sum(trained.values()) <= total <= sum(trained.values()) + padding


@pytest.mark.parametrize("is_meta", [False, True])
@pytest.mark.parametrize("model", [partial(Plain, tied=True), TiedWithBias], ids=["tied", "tied_with_bias"])
@pytest.mark.parametrize("stage", STAGES)
def test_tied_weights_are_one_parameter_with_one_gradient(ranks, stage: int, model, is_meta: bool) -> None:
    run = Run(model, stage=stage, is_meta=is_meta)
    first = ranks(2).run(train_with_engine, run.with_(steps=0))[0].weights
    assert "embed.weight" in first and "head.weight" not in first
    oracle = train_with_torch(run.with_(model=partial(with_values, model, first), is_meta=False), 2)
    assert_close(ranks(2).run(train_with_engine, run)[0], oracle)


def with_values(model, values: dict[str, np.ndarray]) -> nn.Module:
    made = model()
    made.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()}, strict=False)
    return made


@pytest.mark.parametrize("stage", [1, 3])
def test_an_embedding_that_does_more_than_look_up_is_gathered_for_backward(ranks, stage: int) -> None:
    run = Run(Scaled, stage=stage)
    assert_close(ranks(2).run(train_with_engine, run)[0], train_with_torch(run, 2))


class Buffered(Plain):
    """Values and buffers of its own on each rank."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.register_buffer("table", torch.randn(3, 4).t())
        self.register_buffer("mask", torch.tensor([seed == 0, True]))


def build_with_own_seed(rank: int, world_size: int, stage: int) -> list[dict[str, np.ndarray]]:
    engine = start(Run(Plain, stage=stage), Buffered(rank))
    with engine.gathered():
        seen = {name: t.detach().clone().numpy() for name, t in engine.module.state_dict().items()}
    exported = numpy_weights(engine)
    engine.destroy()
    return [seen, exported]


@pytest.mark.parametrize("stage", STAGES)
def test_a_foreign_module_whose_values_differ_by_rank_gets_those_of_rank_0(ranks, stage: int) -> None:
    wanted = {name: t.contiguous().numpy() for name, t in Buffered(0).state_dict().items()}
    (seen, exported), *others = ranks(3).run(build_with_own_seed, stage)
    assert_equal_bits(seen, wanted)
    assert_equal_bits(exported, wanted)
    for seen, exported in others:
        assert_equal_bits(seen, wanted)
        assert exported == {}


@pytest.mark.parametrize("model", [Plain, TiedWithBias])
def test_the_values_of_a_model_born_on_meta_do_not_depend_on_world_or_stage(ranks, model) -> None:
    outcomes = [
        ranks(world).run(train_with_engine, Run(model, stage=stage, steps=0, is_meta=True))[0].weights
        for world, stage in ((1, 0), (2, 1), (2, 3), (3, 3))
    ]
    for other in outcomes[1:]:
        assert_equal_bits(other, outcomes[0])
    spread = outcomes[0]["layers.0.up.weight"]
    assert 0.1 < spread.std() * WIDTH**0.5 < 1 and not np.array_equal(spread, outcomes[0]["layers.1.up.weight"])
    assert np.array_equal(outcomes[0]["norm.weight"], np.ones(WIDTH))


class WithInitialValues(Plain):
    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        return torch.arange(start, stop).float() + len(name)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_holds_values_keeps_them_even_if_it_could_compute_others(ranks, stage: int) -> None:
    run = Run(WithInitialValues, stage=stage, steps=0)
    held = {name: p.detach().numpy() for name, p in build(run).named_parameters()}
    assert_equal_bits(ranks(2).run(train_with_engine, run)[0].weights, held)
    computed = ranks(2).run(train_with_engine, run.with_(is_meta=True))[0].weights
    for name, value in computed.items():
        assert np.array_equal(value.reshape(-1), np.arange(value.size) + len(name))


class Stuck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def build_stuck(rank: int, world_size: int) -> str:
    from raydz.errors import ConfigError

    try:
        start(Run(partial(nn.Sequential, Stuck()), is_meta=True), nn.Sequential(Stuck()).to("meta"))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_meta_module_that_cannot_be_reset_is_refused_by_name(ranks) -> None:
    assert "0 (Stuck)" in ranks(1).run(build_stuck)[0]


def frozen_half(rank: int, world_size: int, stage: int) -> tuple[list[int], list[int]]:
    """bf16 bits of a frozen and a trained parameter of the same values, between two bf16 numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F800001, 0x3F80FFFF], dtype=torch.int32).view(torch.float32)
    for layer in model:
        layer.weight.data.copy_(bits.expand(4, 4))
    model[0].weight.requires_grad_(False)
    engine = start(Run(Plain, stage=stage, bf16=True), model)
    with engine.gathered():
        found = [layer.weight.detach().view(torch.int16).reshape(-1)[:4].tolist() for layer in engine.module]
    engine.destroy()
    return found[0], found[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_every_cast_to_bf16_weights_rounds_halves_away_from_zero(ranks, stage: int) -> None:
    for frozen, trained in ranks(2).run(frozen_half, stage):
        assert frozen == trained == [0x3F81, 0x3F82, 0x3F80, 0x3F81]


def freeze_later(rank: int, world_size: int, run: Run) -> bool:
    """Whether every Parameter object that the caller holds is still the one that is trained."""
    model = build(run)
    held = dict(model.named_parameters())
    engine = start(run, model)
    train_step(engine, run, rank, world_size, 1)
    with engine.gathered():
        is_same = all(p is held[name] for name, p in engine.module.named_parameters())
    engine.destroy()
    return is_same


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_a_real_model_stay_the_same_objects(ranks, stage: int) -> None:
    assert ranks(2).run(freeze_later, Run(Plain, stage=stage)) == [True, True]
