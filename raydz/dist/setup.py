"""Start and end of the default process group: the one place that reads torchrun's environment.

Neighbours: `train/__main__.py` and `engine.py` call this under torchrun; under Ray, Ray Train has done it already.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from raydz.errors import ConfigError


@dataclass(frozen=True)
class World:
    """Where this process stands among all."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device


def _environment_int(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise ConfigError("not a number in the launcher's environment", where=name, got=value) from None


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """`auto` is a GPU where torch sees one.

    Raises:
        ConfigError: `cuda` was asked for and there is none for this local rank.
    """
    available = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not available):
        return torch.device("cpu")
    if local_rank >= available:
        raise ConfigError(
            "no GPU for this rank",
            where="train.device",
            got=f"local rank {local_rank}, {available} GPUs seen",
            wanted="one GPU a rank",
            remedy="start fewer ranks on this host, or set train.device to cpu",
        )
    return torch.device("cuda", local_rank)


def init_world(device: str = "auto", *, timeout_s: float = 300.0, threads: int | None = None) -> World:
    """Join the default process group that the launcher's environment describes; a world of one needs none.

    Collective: all processes of the job. A process group that exists already (Ray Train, or the caller's own) is used.

    Args:
        device: `auto`, `cpu` or `cuda`.
        timeout_s: bound of every collective; a rank that waits longer fails instead of hanging.
        threads: torch threads of this rank; None divides the cores by the ranks of this host.

    Raises:
        ConfigError: the environment is not a launcher's, or there is no GPU for this rank.
    """
    in_group = dist.is_initialized()
    rank = dist.get_rank() if in_group else _environment_int("RANK", 0)
    world_size = dist.get_world_size() if in_group else _environment_int("WORLD_SIZE", 1)
    local_rank = _environment_int("LOCAL_RANK", 0)
    local_world_size = _environment_int("LOCAL_WORLD_SIZE", 1)
    chosen = choose_device(device, local_rank)
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_world_size))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size > 1 and not in_group:
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return World(rank, world_size, local_rank, local_world_size, chosen)


def shutdown_world() -> None:
    """Leave the default process group at once, so that peers that wait for this rank wake with an error."""
    if dist.is_initialized():
        dist.destroy_process_group()
