"""Shard groups smaller than the world (MiCS, HSDP): replicas share the work and agree on the weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.training import Case, train_with_engine, train_with_torch


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world,shard_size", [(4, 2), (4, 1), (2, 1)])
def test_replicas_of_shard_groups_equal_one_process(ranks, world: int, shard_size: int, stage: int, accumulation: int):
    case = Case(stage=stage, shard_size=shard_size, accumulation=accumulation)
    outcome, oracle = ranks(world).run(train_with_engine, case)[0], train_with_torch(case)
    for name, weights in oracle.weights.items():
        np.testing.assert_allclose(outcome.weights[name], weights, rtol=0, atol=16 * 2**-23, err_msg=name)
    np.testing.assert_allclose(outcome.norms, oracle.norms, rtol=5e-6)


def test_bf16_replicas_have_the_same_bits_over_stages(ranks):
    first, *others = [
        ranks(4).run(train_with_engine, Case(stage=s, shard_size=2, bf16=True))[0] for s in range(4)
    ]  # fmt: skip
    for other in others:
        for name, weights in first.weights.items():
            assert np.array_equal(weights.view(np.int32), other.weights[name].view(np.int32)), name


def state_per_rank(rank: int, world_size: int, shard_size: int) -> int:
    import torch

    import raydz

    model = torch.nn.Linear(64, 64, bias=False)
    parallel = {"shard_size": shard_size}
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "parallel": parallel}
    engine = raydz.initialize(model, config, device="cpu")
    held = sum(t.numel() for state in engine.optimizer.states for t in state.values())
    engine.destroy()
    return held


def test_state_is_sharded_over_the_group_alone(ranks):
    assert ranks(4).run(state_per_rank, 4) == [2 * 64 * 64 // 4] * 4
    assert ranks(4).run(state_per_rank, 2) == [2 * 64 * 64 // 2] * 4
    assert ranks(4).run(state_per_rank, 1) == [2 * 64 * 64] * 4


def save_and_load(rank: int, world_size: int, folder: str) -> bool:
    import torch

    import raydz

    def engine_of(stage: int, shard_size: int | None):
        torch.manual_seed(stage)
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 7))
        config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "parallel": {"shard_size": shard_size}}
        return raydz.initialize(model, config, device="cpu")

    saved = engine_of(3, 2)
    loss = saved(torch.ones(1, 6) * (rank + 1)).square().mean()
    saved.backward(loss)
    saved.step()
    uri = saved.save_checkpoint(folder)
    loaded = engine_of(1, None)
    loaded.load_checkpoint(uri)
    left, right = saved.full_state_dict(), loaded.full_state_dict()
    return all(torch.equal(left[name], right[name]) for name in left) and loaded.global_steps == 1


def test_replicas_save_each_element_once_and_load_elsewhere(ranks, tmp_path):
    assert ranks(4).run(save_and_load, str(tmp_path)) == [True] * 4


def test_a_shard_size_that_does_not_divide_the_world_is_refused(ranks):
    from tests.support.ranks import RankFailure

    with pytest.raises(RankFailure, match=r"ConfigError: the shard group size does not divide the world"):
        ranks(3).run(state_per_rank, 2)
