"""The few functions of `deepspeed.comm` that training scripts call; torch.distributed has the others.

Every one works in a single process without a process group, as the engine does.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from raydz.deepspeed.arguments import init_distributed
from raydz.deepspeed.refusals import refuse_name

__all__ = ["barrier", "get_local_rank", "get_rank", "get_world_size", "init_distributed", "is_initialized"]


def is_initialized() -> bool:
    """Whether the default process group is there."""
    return dist.is_initialized()


def get_rank() -> int:
    """This process among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_local_rank() -> int:
    """This process among those of its host, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def barrier() -> None:
    """Wait for all ranks. Collective."""
    if dist.is_initialized():
        dist.barrier()


def __getattr__(name: str) -> Any:
    """Collectives are torch's own: a script's tensors are its own business."""
    if name in ("all_reduce", "all_gather", "broadcast", "reduce", "ReduceOp", "all_gather_object", "new_group"):
        return getattr(dist, name)
    refuse_name(name, "deepspeed.comm")
