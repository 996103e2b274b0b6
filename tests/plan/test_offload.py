"""Bytes that offload keeps on the host and on a disk, against those that engines hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raydz.config import Config
from raydz.offload.memory import PAGE
from tests.plan.measuring import backwards
from tests.plan.test_memory import config_of, plan_of

CPU, NVME = {"device": "cpu"}, {"device": "nvme"}


def held(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """What is held between backward and step, and how many buffers."""
    import raydz.engine
    from raydz.train.build import build_model
    from raydz.train.memory import measured_bytes

    engine = raydz.engine.initialize(build_model(config, 0, None), config.engine(), device="cpu")
    backwards(engine, config, rank)
    found: dict[str, Any] = measured_bytes(engine)
    found |= {"host": engine.host_memory.bytes_held, "buffers": len(engine.host_memory._held)}
    engine.step()
    engine.destroy()
    return found


def check(ranks, world: int, config: Config) -> None:
    plan, parts = plan_of(config, world), plan_of(config, world).memory.parts()
    for found in ranks(world).run(held, config):
        assert 0 <= found["host"] - plan.offloaded.host < found["buffers"] * PAGE
        assert found["masters"] == parts["masters"] and found["moments"] == parts["moments"]


def offloading(stage: int, dtype: str = "bf16", mode: str = "waiting", **zero: Any) -> Config:
    return config_of(
        stage, zero=zero, bf16={"enabled": dtype == "bf16"}, fp16={"enabled": dtype == "fp16"},
        parallel={"offload_update": mode},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "world", "dtype"),
    [
        (2, 1, "bf16"),
        (3, 2, "bf16"),
        *(pytest.param(s, 2, d, marks=pytest.mark.slow) for s, d in ((0, "fp16"), (1, "fp32"))),
    ],
)
def test_optimizer_states_are_the_host_bytes_that_an_engine_holds(ranks, stage, world, dtype):
    check(ranks, world, offloading(stage, dtype, offload_optimizer=CPU))


def test_a_ratio_leaves_the_first_groups_on_the_device(ranks):
    check(ranks, 1, offloading(2, offload_optimizer=CPU | {"ratio": 0.5}))


def test_second_buffers_are_as_large_as_the_states(ranks):
    waiting = plan_of(offloading(2, offload_optimizer=CPU), 1).offloaded
    config = offloading(2, mode="speculative", offload_optimizer=CPU)
    (found,) = ranks(1).run(held, config)
    assert 0 <= found["host"] - waiting.host - waiting.second < found["buffers"] * PAGE


def test_weights_of_both_offloads_are_on_the_host_once(ranks):
    both = offloading(3, offload_optimizer=CPU, offload_param=CPU)
    check(ranks, 2, both)
    alone = offloading(3, offload_param=CPU)
    check(ranks, 2, alone)
    assert plan_of(both, 2).offloaded.weights == plan_of(alone, 2).offloaded.host


def test_what_is_on_a_disk_is_not_on_the_host():
    zero = {"offload_optimizer": NVME | {"nvme_path": "/tmp"}, "offload_param": NVME | {"nvme_path": "/tmp"}}
    on_disk, on_host = (
        plan_of(offloading(3, **sections), 2).offloaded
        for sections in (zero, {"offload_optimizer": CPU, "offload_param": CPU})
    )
    gradients = on_disk.host
    assert on_disk.disk == on_host.host - gradients + on_host.weights and not on_disk.second
    assert on_disk.masters == on_host.masters and torch.bfloat16.itemsize * gradients > 0
