"""A script's own torch optimizer and scheduler, read and taken over: the engine updates and schedules itself.

Neighbours: `initialize.py` calls these before the model is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from raydz.config import load_engine
from raydz.errors import ConfigError
from raydz.optim.schedule import RateOnly

_TAKEN: dict[type, tuple[str, tuple[str, ...]]] = {
    torch.optim.AdamW: ("AdamW", ("betas", "eps")),
    torch.optim.Adam: ("Adam", ("betas", "eps")),
    torch.optim.SGD: ("SGD", ("momentum", "dampening", "nesterov")),
}
"""Class -> type in the configuration, and what besides `lr` and `weight_decay` must be alike in all groups."""
_CHANGES_THE_UPDATE = ("amsgrad", "maximize", "differentiable")
_WHERE = "deepspeed.initialize(optimizer=…)"


@dataclass(frozen=True)
class LambdaSchedule(RateOnly):
    """torch's LambdaLR as a function of the step: the base rate times what its function says.

    Args:
        first: the epoch, in torch's word, of the first step.
    """

    base_lr: float
    factor: Callable[[int], float]
    first: int = 0

    def lr(self, step: int) -> float:
        return self.base_lr * self.factor(self.first + step - 1)


def optimizer_section(optimizer: torch.optim.Optimizer) -> Any:
    """The configuration's `optimizer` that does what this one would.

    Raises:
        ConfigError: another class, settings that raydz has not, or moments, which would be lost.
    """
    if type(optimizer) not in _TAKEN:
        raise ConfigError(
            "raydz does not know this optimizer", where=_WHERE, got=type(optimizer).__name__,
            wanted=", ".join(f"torch.optim.{kind.__name__}" for kind in _TAKEN),
            remedy="name one in the configuration's optimizer section",
        )  # fmt: skip
    if optimizer.state:
        raise ConfigError("the optimizer has made steps", where=_WHERE, got="moments", wanted="a new optimizer")
    name, alike = _TAKEN[type(optimizer)]
    first = optimizer.param_groups[0]
    for group in optimizer.param_groups:
        changed = [key for key in _CHANGES_THE_UPDATE if group.get(key)]
        uneven = [key for key in alike if group[key] != first[key]]
        if changed or uneven:
            raise ConfigError(
                "raydz does not do this" if changed else "groups may differ in lr and weight_decay alone",
                where=f"{_WHERE}: {', '.join(changed or uneven)}", remedy="leave it at its default",
            )  # fmt: skip
    params: dict[str, Any] = {key: first[key] for key in ("lr", "weight_decay", *alike)}
    params = {key: list(value) if isinstance(value, tuple) else value for key, value in params.items()}
    params = {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in params.items()}
    if name == "Adam":
        params["adam_w_mode"] = bool(first.get("decoupled_weight_decay", False))
    return load_engine({"train_batch_size": 1, "optimizer": {"type": name, "params": params}}).optimizer


def read_groups(model: nn.Module, trained: list[Any] | None, params: Any) -> list[dict[str, Any]]:
    """Parameter groups with `params`, `lr` and `weight_decay`, the optimizer's where a group has none.

    Raises:
        ConfigError: a member is no parameter of the model.
    """
    given = list(model.parameters()) if trained is None else trained
    if not all(isinstance(entry, dict) for entry in given):
        given = [{"params": given}]
    known = {id(parameter) for parameter in model.parameters()}
    groups = []
    for index, entry in enumerate(given):
        members = entry.get("params", [])
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        members = [member[1] if isinstance(member, tuple) else member for member in members]
        if not members or any(id(member) not in known for member in members):
            raise ConfigError(
                "a group of parameters that are not the model's", where=f"model_parameters[{index}]",
                got=f"{len(members)} members", wanted="parameters of the model that is handed over",
            )  # fmt: skip
        lr, decay = entry.get("lr", params.lr), entry.get("weight_decay", params.weight_decay)
        groups.append({**entry, "params": members, "lr": float(lr), "weight_decay": float(decay)})
    return groups


def read_scheduler(scheduler: Any, base_lr: float, model: nn.Module) -> LambdaSchedule:
    """The schedule that a LambdaLR, or a function that makes one, stands for.

    Raises:
        ConfigError: another scheduler, or one with a function of its own for each group.
    """
    if not isinstance(scheduler, LambdaLR) and callable(scheduler):
        scheduler = scheduler(torch.optim.SGD(list(model.parameters())[:1], lr=base_lr))
    if not isinstance(scheduler, LambdaLR) or any(f is not scheduler.lr_lambdas[0] for f in scheduler.lr_lambdas):
        raise ConfigError(
            "a schedule here is a function of the step", where="deepspeed.initialize(lr_scheduler=…)",
            got=type(scheduler).__name__, wanted="a LambdaLR with one function, or a scheduler section",
            remedy="name one of DeepSpeed's five in the configuration's scheduler section",
        )  # fmt: skip
    return LambdaSchedule(base_lr, scheduler.lr_lambdas[0], int(scheduler.last_epoch))
