"""Optimizers by DeepSpeed's and torch's names. Neighbours: `engine.py` calls this with the configuration's section."""

from __future__ import annotations

from typing import Any

import torch

from raydz.errors import ConfigError
from raydz.optim.by_name import ELEMENTWISE, TorchOptimizer
from raydz.optim.elementwise import SGD, Lion
from raydz.optim.muon import Muon
from raydz.optim.optimizer import AdamW, Optimizer


def build_optimizer(name: str, *, threads: int | None = None, **params: Any) -> Optimizer:
    """Build an optimizer from DeepSpeed's or torch's name and parameters, whose defaults are those of `raydz.config`.

    Args:
        name: `Adam` means AdamW unless `adam_w_mode` is false.
        threads: of compiled kernels; None is torch's number.

    Raises:
        ConfigError: the name is not known.
    """
    lower, threads = name.lower(), threads or torch.get_num_threads()
    if lower in ("adam", "adamw"):
        decoupled = lower == "adamw" or params.pop("adam_w_mode", True)
        params.pop("adam_w_mode", None)
        return _adamw(params, decoupled=decoupled, threads=threads)
    if lower == "sgd":
        return SGD(threads=threads, **params)
    if lower == "lion":
        beta1, beta2 = params.pop("betas", (0.9, 0.99))
        return Lion(beta1=beta1, beta2=beta2, threads=threads, **params)
    if lower == "muon":
        return _muon(params, threads)
    for known in ELEMENTWISE:
        if known.lower() == lower:
            return _torch(known, params)
    wanted = ", ".join(("AdamW", "Adam", "SGD", "Lion", "Muon", *ELEMENTWISE))
    raise ConfigError("unknown optimizer", where="optimizer.type", got=name, wanted=wanted)


def _adamw(params: dict[str, Any], *, decoupled: bool, threads: int) -> AdamW:
    beta1, beta2 = params.pop("betas", (0.9, 0.999))
    return AdamW(beta1=beta1, beta2=beta2, decoupled=decoupled, threads=threads, **params)


def _muon(params: dict[str, Any], threads: int) -> Muon:
    defaults = {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True, "ns_method": "gram", "ns_steps": 5}
    params = {**defaults, **params}
    moments = {"betas": params.pop("betas", (0.9, 0.95)), "eps": params.pop("eps", 1e-10)}
    for name in ("muon_lr", "adam_lr"):
        if params.get(name) and not params["lr"]:
            raise ConfigError(
                "a rate cannot scale with a schedule that is 0", where=f"optimizer.params.{name}", got=params[name],
                wanted="optimizer.params.lr above 0",
            )  # fmt: skip
    return Muon(rest=_adamw(moments, decoupled=True, threads=threads), **params)


def _torch(name: str, params: dict[str, Any]) -> TorchOptimizer:
    kind = getattr(torch.optim, name)
    signature = kind([torch.zeros(1)]).defaults
    lr = params.pop("lr", signature["lr"])
    weight_decay = params.pop("weight_decay", 0.0)
    options = {key: params.get(key, value) for key, value in signature.items() if key in params or key in _NEEDED}
    unknown = set(params) - set(options)
    if unknown:
        raise ConfigError("unknown parameter", where=f"optimizer.params.{min(unknown)}", wanted=f"those of {name}")
    return TorchOptimizer(name, lr, weight_decay, options)


_NEEDED = ("betas", "momentum_decay")
"""What `TorchOptimizer` itself reads."""
