"""Every optimizer over shards of every stage and world size, against plain torch in one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.optim.training import PARAMS, Case, train_with_engine, train_with_torch
from tests.zero.training import assert_close, assert_equal_bits

ELEMENTWISE = ["SGD", "NAdam", "RMSprop", "Adagrad"]
SLOW = pytest.mark.slow
WORLDS = [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)]
STAGES = [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3]
FEW = [name if name in ("Muon", "SGD", "NAdam") else pytest.param(name, marks=SLOW) for name in PARAMS]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ones_equal_one_process_of_torch(ranks, name: str, stage: int, world: int) -> None:
    case = Case(name, stage)
    assert_close(ranks(world).run(train_with_engine, case)[0], train_with_torch(case, world))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_lion_equals_the_papers_equations(ranks, stage: int, world: int) -> None:
    found = ranks(world).run(train_with_engine, Case("Lion", stage))[0]
    wanted = train_with_torch(Case("Lion", stage), world)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=2e-6)
    for name, weights in wanted.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=4e-6, err_msg=name)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_muon_equals_exact_singular_values_in_one_process(ranks, stage: int, world: int) -> None:
    found = ranks(world).run(train_with_engine, Case("Muon", stage))[0]
    wanted = train_with_torch(Case("Muon", stage), world)
    # A gradient's rounding error, about 2^-22 of its norm, grows by at most 3.4445^5 = 485 in the iteration: 1.2e-4
    # of lr 3e-2, in each of three steps.
    assert found.weights.keys() == wanted.weights.keys()
    for name, weights in wanted.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=1.2e-5, err_msg=name)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", FEW)
def test_stages_are_bit_equal(ranks, name: str, world: int, bf16: bool) -> None:
    first, *others = [ranks(world).run(train_with_engine, Case(name, stage, bf16))[0] for stage in range(4)]
    for other in others:
        assert_equal_bits(other.weights, first.weights)


@pytest.mark.parametrize("name", ["Muon", "SGD", "RMSprop"])
@pytest.mark.parametrize("bucket", [1, 70, 130])
def test_buckets_do_not_change_a_bit(ranks, name: str, bucket: int) -> None:
    whole, cut = (ranks(3).run(train_with_engine, Case(name, 3, bucket=size))[0] for size in (None, bucket))
    assert_equal_bits(cut.weights, whole.weights)


@pytest.mark.parametrize("name", ["SGD", "Muon"])
def test_bf16_keeps_masters_that_follow_fp32(ranks, name: str) -> None:
    half = ranks(2).run(train_with_engine, Case(name, 3, bf16=True))[0]
    full = ranks(2).run(train_with_engine, Case(name, 3))[0]
    np.testing.assert_allclose(half.losses, full.losses, rtol=0, atol=2**-8)
    assert all(weights.dtype == np.float32 for weights in half.weights.values())


@pytest.mark.parametrize("schedule", [False, True], ids=["constant", "warmup"])
@pytest.mark.parametrize(("name", "stage", "world"), [("SGD", 0, 1), ("SGD", 3, 3), ("NAdam", 2, 2), ("NAdam", 3, 3)])
def test_parameter_groups_have_rates_and_decays_of_their_own(ranks, name, stage, world, schedule) -> None:
    case = Case(name, stage, grouped=True, schedule=schedule)
    found = ranks(world).run(train_with_engine, case)[0]
    assert_close(found, train_with_torch(case, world))
    plain = train_with_torch(case.with_(grouped=False), world)
    assert np.abs(plain.weights["head.weight"] - found.weights["head.weight"]).max() > 1e-4


@pytest.mark.parametrize("world", WORLDS)
def test_standard_muon_follows_torchs(ranks, world: int) -> None:
    found, *others = [
        ranks(world).run(train_with_engine, Case("Muon", stage, ns_method="standard"))[0] for stage in (3, 0, 2)
    ]
    wanted = train_with_torch(Case("Muon", ns_method="standard"), world)
    # bf16 iterations: where a gradient's last bit turns a rounding, results differ by some 2^-8 of lr 3e-2 a step.
    for name, weights in wanted.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=3 * 3e-2 * 2**-6, err_msg=name)
    for other in others:
        assert_equal_bits(other.weights, found.weights)


def test_replicas_of_shards_make_their_matrices_orthogonal_alike(ranks) -> None:
    everyone = ranks(4).run(train_with_engine, Case("Muon", 3, shard_size=2))
    wanted = train_with_torch(Case("Muon", 3), 4)
    for name, weights in wanted.weights.items():
        np.testing.assert_allclose(everyone[0].weights[name], weights, rtol=0, atol=1.2e-5, err_msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_muon_sums_micro_batches_first(ranks, stage: int) -> None:
    found = ranks(2).run(train_with_engine, Case("Muon", stage, accumulation=3))[0]
    wanted = train_with_torch(Case("Muon", stage), 2)
    for name, weights in wanted.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=1.2e-5, err_msg=name)
