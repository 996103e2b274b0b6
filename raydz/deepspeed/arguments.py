"""What a DeepSpeed script does before `initialize`: its command line, and joining the other ranks.

Neighbours: `initialize.py` reads the configuration's path from the parsed arguments.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

from raydz import log
from raydz.dist import init_world
from raydz.errors import ConfigError

_BACKENDS = {None: "auto", "nccl": "cuda", "gloo": "cpu"}
_logger = log.get(__name__)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` (accepted, and without effect, as in DeepSpeed) and `--deepspeed_config FILE`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="accepted; initialize is what enables the engine")
    group.add_argument("--deepspeed_config", default=None, type=str, help="JSON file of the configuration")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = timedelta(minutes=30),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the default process group that the launcher's environment describes, as DeepSpeed's launcher or torchrun sets it.

    Args:
        dist_backend: nccl, gloo, or None for what the devices want.
        dist_init_required: False does nothing: the script has its own group.
        init_method, rank, world_size: only as the environment has them; others are refused.

    Collective: all processes. A group that is there already is used.

    Raises:
        ConfigError: another backend, or an address of one's own.
    """  # noqa: E501
    if dist_init_required is False:
        return
    if dist_backend not in _BACKENDS:
        raise ConfigError(
            "not a backend of raydz", where="init_distributed(dist_backend=…)", got=dist_backend, wanted="nccl or gloo"
        )
    if init_method not in (None, "env://") or rank != -1 or world_size != -1:
        raise ConfigError(
            "ranks find each other by the launcher's environment", where="init_distributed(init_method, rank, …)",
            got=f"{init_method}, rank {rank} of {world_size}", wanted="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
            remedy="start the script with torchrun, or initialise torch.distributed before this call",
        )  # fmt: skip
    init_world(_BACKENDS[dist_backend], timeout_s=timeout.total_seconds())
