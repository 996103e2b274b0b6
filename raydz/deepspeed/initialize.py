"""`deepspeed.initialize`: a script's model, optimizer, groups, data and configuration become an engine.

Neighbours: `client.py` reads torch's optimizers and schedulers; `engine.py` has what is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from raydz.config import EngineConfig, load_engine
from raydz.deepspeed.client import LambdaSchedule, optimizer_section, read_groups, read_scheduler
from raydz.deepspeed.engine import CountingEngine, DeepSpeedEngine
from raydz.deepspeed.refusals import refuse_arguments
from raydz.deepspeed.views import OptimizerView, SchedulerView
from raydz.dist import init_world
from raydz.errors import ConfigError

_REMEDIES = {
    "mpu": "tensor and pipeline parallelism are not raydz's; leave it out",
    "mesh_param": "sequence parallelism comes with a later release; leave it out",
}
_FIXED_RATES = ("WarmupDecayLR", "LRRangeTest", "OneCycle")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, OptimizerView, DataLoader | None, SchedulerView]:
    """Shard `model` over the ranks of this job: (engine, optimizer, dataloader, lr_scheduler).

    Args:
        args: `deepspeed_config` is read where `config` is not given.
        model: with values, or built within `zero.Init`.
        optimizer: torch's Adam, AdamW or SGD without state, whose settings are taken over, or a function of the
            parameters that makes one; overrides the configuration's.
        model_parameters: what is trained, as parameters or groups; None is all of it.
        training_data: a map-style dataset, read in micro-batches by a DistributedSampler.
        lr_scheduler: a LambdaLR of that optimizer, or a function of an optimizer that makes one; overrides the
            configuration's.
        distributed_port, dist_init_required: without effect: ranks meet as the launcher says.
        collate_fn: the dataloader's.
        config_params: DeepSpeed's old name of `config`.

    Collective: every rank, with the same arguments.

    Raises:
        ConfigError: the configuration or an argument is wrong, or not done here; names it.
    """
    refuse_arguments("deepspeed.initialize", _REMEDIES, {"mpu": mpu, "mesh_param": mesh_param})
    if not isinstance(model, nn.Module):
        raise ConfigError("there is no model", where="deepspeed.initialize(model=…)", got=type(model).__name__)
    loaded = load_engine(_source(args, config if config is not None else config_params))
    trained = None if model_parameters is None else list(model_parameters)
    if optimizer is not None:
        own = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(trained or [*model.parameters()])
        loaded = loaded.model_copy(update={"optimizer": optimizer_section(own)})
        trained = list(own.param_groups)
    elif "optimizer" not in loaded.model_fields_set:
        raise ConfigError(
            "nothing says how to update the weights", where="optimizer", got="neither a section nor an argument",
            remedy='add "optimizer": {"type": "AdamW", "params": {"lr": …}}, or give initialize an optimizer',
        )  # fmt: skip
    groups = read_groups(model, trained, loaded.optimizer.params)
    schedule = None if lr_scheduler is None else read_scheduler(lr_scheduler, loaded.optimizer.params.lr, model)
    groups = _with_the_schedules_rates(groups, loaded) if schedule is None else groups
    engine = _build(model, loaded, groups, schedule)
    if training_data is not None:
        engine.training_dataloader = _loader(engine, training_data, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _source(args: Any, config: Any) -> Any:
    """The configuration; an argument goes before the command line's.

    Raises:
        ConfigError: there is none, or there are two.
    """
    named = getattr(args, "deepspeed_config", None)
    if config is not None and named is not None:
        raise ConfigError(
            "the configuration is given twice", where="deepspeed.initialize(config=…)", got=f"and {named}",
            remedy="give it either as an argument or with --deepspeed_config",
        )  # fmt: skip
    if config is None and named is None:
        raise ConfigError(
            "there is no configuration", where="deepspeed.initialize(config=…)",
            wanted="a dict, the path of a JSON file, or --deepspeed_config",
        )  # fmt: skip
    return named if config is None else config


def _with_the_schedules_rates(groups: list[dict[str, Any]], config: EngineConfig) -> list[dict[str, Any]]:
    """DeepSpeed's schedules with rates of their own set them for every group, whatever rate the group has.

    Raises:
        ConfigError: a warm-up from a rate above 0 to groups' own rates, which is not in proportion to any of them.
    """
    scheduler, base = config.scheduler, config.optimizer.params.lr
    if scheduler is None or all(group["lr"] == base for group in groups):
        return groups
    rises_to = getattr(scheduler.params, "warmup_max_lr", None)
    if scheduler.type in _FIXED_RATES or (scheduler.type == "WarmupLR" and rises_to is not None):
        return [{**group, "lr": base} for group in groups]
    if scheduler.type == "WarmupLR" and scheduler.params.warmup_min_lr > 0:
        raise ConfigError(
            "groups with rates of their own do not rise in proportion", where="scheduler.params.warmup_min_lr",
            got=scheduler.params.warmup_min_lr, wanted="0", remedy="or give all groups the same lr",
        )  # fmt: skip
    return groups


def _build(
    model: nn.Module, config: EngineConfig, groups: list[dict[str, Any]], schedule: LambdaSchedule | None
) -> DeepSpeedEngine:
    """The engine, with each group's decay for all of its parameters: norms and biases too, as in DeepSpeed."""
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    named = [{**group, "params": [by_identity[id(p)] for p in group["params"]]} for group in groups]
    world = init_world(timeout_s=config.parallel.collective_timeout_s)
    settings = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
    engine = CountingEngine(model, config, world, model_parameters=settings)
    if schedule is not None:
        engine.schedule = schedule
    return DeepSpeedEngine(engine, named)


def _loader(engine: DeepSpeedEngine, data: Dataset, collate_fn: Callable | None) -> DataLoader:
    """Micro-batches of this rank's rows, shuffled by a DistributedSampler as DeepSpeed's are."""
    if not hasattr(data, "__len__"):
        raise ConfigError(
            "a dataset without a length cannot be dealt out to ranks", where="deepspeed.initialize(training_data=…)",
            got=type(data).__name__, wanted="a map-style dataset", remedy="make the DataLoader yourself",
        )  # fmt: skip
    shape, world = engine.raydz.mesh.shape, engine.raydz.world
    sampler: DistributedSampler = DistributedSampler(
        data, num_replicas=shape.batch_world_size, rank=shape.batch_rank(world.rank)
    )
    return DataLoader(
        data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, collate_fn=collate_fn,
        pin_memory=world.device.type == "cuda",
    )  # fmt: skip
