"""Where a process stands, from the launcher's environment."""

from __future__ import annotations

import pytest
import torch

from raydz.dist import init_world
from raydz.dist.setup import choose_device
from raydz.errors import ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def bare(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield monkeypatch
    torch.set_num_threads(threads)


def test_without_a_launcher_there_is_one_rank_and_no_process_group(bare) -> None:
    world = init_world("cpu")
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
    assert world.device == torch.device("cpu")
    assert not torch.distributed.is_initialized()


def test_threads_can_be_set(bare) -> None:
    init_world("cpu", threads=3)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("name", VARIABLES)
def test_an_environment_that_is_not_a_number_is_named(bare, name: str) -> None:
    bare.setenv(name, "first")
    with pytest.raises(ConfigError) as caught:
        init_world("cpu")
    assert name in str(caught.value) and "first" in str(caught.value)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU for this rank"):
        choose_device("cuda", 0)
    assert choose_device("auto", 0) == torch.device("cpu")


def test_each_local_rank_has_a_gpu_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match="local rank 2, 2 GPUs seen"):
        choose_device("auto", 2)


def where(rank: int, world_size: int) -> tuple[int, int]:
    world = init_world("cpu")
    return world.rank, world.world_size


def test_a_process_group_that_exists_is_used(ranks) -> None:
    assert ranks(2).run(where) == [(0, 2), (1, 2)]
