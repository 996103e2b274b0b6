"""Where and on how many threads updates run: `parallel.offload_threads` and `parallel.offload_affinity`."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from raydz.config import load_engine
from raydz.errors import ConfigError
from raydz.offload.memory import HostMemory
from raydz.offload.options import Hosting, own_share
from raydz.ops import native
from tests.offload.training import RUN, engine_of, hosted
from tests.zero.training import train_step


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_of_a_node_share_the_cpus_out(world):
    cpus = [0, 1, 2, 3, 8, 9, 10]
    shares = [own_share(cpus, rank, world) for rank in range(world)]
    assert [cpu for share in shares for cpu in share] == cpus
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_cpus_share_them():
    assert [own_share([4, 7], rank, 4) for rank in range(4)] == [[4], [4], [7], [7]]


@pytest.mark.parametrize(("threads", "wanted"), [(None, len(os.sched_getaffinity(0))), (5, 5)])
def test_threads_are_configured_and_never_taken_from_the_environment(monkeypatch, threads, wanted):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = load_engine({"zero_optimization": zero, "parallel": {"offload_threads": threads}})
    hosting = Hosting.from_config(config, lambda: HostMemory(1 << 20), 1)
    assert hosting is not None and hosting.threads == wanted


def pool_affinities(rank: int, world_size: int, cpu: int) -> set[frozenset[int]]:
    """Of the threads that the kernels started in a training, where they may run."""
    config = hosted(RUN.config(), "waiting")
    config["parallel"] = config["parallel"] | {"offload_affinity": [cpu]}
    engine = engine_of(RUN, config)
    train_step(engine, RUN, rank, world_size, 1)
    engine.optimizer.finish()
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    kernels, values = native.require(), torch.ones(8 * 65536)
    kernels.sum_squares(values, 4)
    found = {frozenset(os.sched_getaffinity(int(t.name))) for t in Path("/proc/self/task").iterdir()
             if t.name not in before}  # fmt: skip
    assert os.sched_getaffinity(threading.get_native_id()) != {cpu} or os.cpu_count() == 1
    engine.destroy()
    return found


@pytest.mark.native
def test_the_kernels_of_a_training_run_on_the_cpus_of_the_key(ranks):
    cpu = max(os.sched_getaffinity(0))
    (found,) = ranks(1).run(pool_affinities, cpu)
    assert found == {frozenset({cpu})}


def test_a_cpu_that_is_not_there_is_refused_by_the_key():
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = load_engine({"zero_optimization": zero, "parallel": {"offload_affinity": [1023]}})
    with pytest.raises(ConfigError) as caught:
        Hosting.from_config(config, lambda: HostMemory(1 << 20), 1)
    assert caught.value.where == "parallel.offload_affinity"
