"""`deepspeed.zero`: the two contexts that scripts use around a model.

Neighbours: `engine.py` knows which engine a parameter belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raydz.deepspeed.engine import ENGINES, DeepSpeedEngine
from raydz.deepspeed.refusals import refuse_arguments, refuse_name
from raydz.errors import ConfigError

__all__ = ["GatheredParameters", "Init"]

_INIT_REMEDIES = {
    "module": "build the model within the context instead of handing it over",
    "remote_device": "offload comes with a later release",
    "sequence_data_parallel_group": "sequence parallelism comes with a later release",
    "data_parallel_group": "the engine shards over all ranks",
    "param_swapper": "offload comes with a later release",
}


@contextmanager
def Init(
    module: nn.Module | None = None,
    data_parallel_group: Any = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: Any = None,
    config: Any = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: Any = None,
    **others: Any,
) -> Iterator[None]:
    """Build the model without values, under the meta device; `initialize` makes it real one unit at a time.

    Its first values then come from each module's `reset_parameters`, under a seed from its name: no rank holds more
    than a unit, and they depend neither on the stage nor on the number of ranks. `enabled=False` builds as usual.

    Raises:
        ConfigError: an argument that asks for what raydz has not.
    """
    given = {"module": module, "data_parallel_group": data_parallel_group, "remote_device": remote_device, **others}
    refuse_arguments("zero.Init", _INIT_REMEDIES | dict.fromkeys(others, "remove it"), given)
    if not enabled:
        yield
        return
    with torch.device("meta"):
        yield


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Let parameters of an engine show whole values within the block.

    Parameters that no engine has yet are whole anyway; what rank 0 makes of them is what `initialize` takes.

    Args:
        modifier_rank: None to read; 0 to show the fp32 masters and keep what rank 0 makes of them.

    Collective: every rank, between steps. Memory: the flat groups of these parameters.

    Raises:
        ConfigError: another `modifier_rank`, or parameters of several engines.
    """
    members: list[torch.Tensor] = [params] if isinstance(params, torch.Tensor) else list(params)
    engine = _engine_of(members) if enabled else None
    if engine is not None and modifier_rank not in (None, 0):
        raise ConfigError(
            "rank 0 is the one that changes parameters", where="zero.GatheredParameters(modifier_rank=…)",
            got=modifier_rank, wanted="None or 0",
        )  # fmt: skip
    if engine is None:
        yield
        return
    wanted = {id(p) for p in members}
    names = [name for name, p in engine.module.named_parameters() if id(p) in wanted]
    with engine.raydz.gathered(names, modify=modifier_rank == 0):
        yield


def _engine_of(members: list[torch.Tensor]) -> DeepSpeedEngine | None:
    """The engine of the parameters, if there is one.

    Raises:
        ConfigError: they belong to several.
    """
    wanted = {id(p) for p in members}
    found = [engine for engine in list(ENGINES) if wanted & {id(p) for p in engine.module.parameters()}]
    if len(found) > 1:
        raise ConfigError("parameters of several engines", where="zero.GatheredParameters", wanted="those of one")
    return found[0] if found else None


def __getattr__(name: str) -> Any:
    refuse_name(name, "deepspeed.zero")
