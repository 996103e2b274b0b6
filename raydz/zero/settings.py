"""What each parameter is updated with: weight decay, share of the learning rate, and whether as a whole matrix.

Neighbours: `engine.py` reads the caller's parameter groups before the model is sharded; `update.py` cuts shards into
runs by this. See "Settings" in README.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd as _Convolution

from raydz.errors import ConfigError
from raydz.optim import Muon, Optimizer
from raydz.zero.units import ParameterSpec, block_names, parameter_specs

_WHERE = "model_parameters"
_KEYS = ("params", "lr", "weight_decay", "use_muon", "name")


@dataclass(frozen=True)
class ParameterSettings:
    """How one parameter is updated.

    Args:
        lr_scale: factor of the schedule's rate.
        is_matrix: by Muon, as a whole.
    """

    weight_decay: float
    lr_scale: float = 1.0
    is_matrix: bool = False


Settings = Mapping[str, ParameterSettings]
"""By the parameter's first name."""


def plan_settings(
    model: nn.Module, optimizer: Optimizer, model_parameters: Iterable[Any] | None = None
) -> dict[str, ParameterSettings]:
    """Settings of every parameter of `model`, which is not sharded yet.

    Args:
        model_parameters: torch's parameter groups (`params`, `lr`, `weight_decay`, `use_muon`), or parameters; None:
            all of them. A group's `lr` is what the schedule makes of the optimizer's `lr`, in proportion. Without
            `weight_decay` it has the optimizer's, but for norms and biases; with one, all of its parameters have that.

    Raises:
        ConfigError: a group does not fit the model (names the parameter or key), or Muon has no matrix.
    """
    groups = None if model_parameters is None else _by_identity(list(model_parameters))
    blocks, settings = block_names(model), {}
    specs = parameter_specs(model)
    for spec in specs:
        is_listed = groups is None or id(spec.parameter) in groups
        if spec.parameter.requires_grad and not is_listed:
            raise ConfigError(
                "a trainable parameter is in no group", where=f"{_WHERE}: {spec.name}",
                remedy="add it to a group, or freeze it with requires_grad_(False)",
            )  # fmt: skip
        group = {} if groups is None else groups.get(id(spec.parameter), {})
        settings[spec.name] = _settings(spec, optimizer, group, blocks)
    if groups is not None and not groups.keys() <= {id(spec.parameter) for spec in specs}:
        raise ConfigError("a group has a parameter that is not the model's", where=_WHERE)
    trained = [spec.name for spec in specs if spec.parameter.requires_grad]
    if isinstance(optimizer, Muon) and not any(settings[name].is_matrix for name in trained):
        raise ConfigError(
            "Muon finds no matrix", where="optimizer.type", got="no trainable matrix inside the blocks of a ModuleList",
            remedy="set parameter.use_muon = True on those it shall update, or choose another optimizer",
        )  # fmt: skip
    return settings


def _by_identity(given: list[Any]) -> dict[int, dict[str, Any]]:
    """The group of each parameter."""
    if not all(isinstance(entry, Mapping) for entry in given):
        given = [{"params": given}]
    found: dict[int, dict[str, Any]] = {}
    for index, entry in enumerate(given):
        unknown = set(entry) - set(_KEYS)
        if unknown or "params" not in entry:
            raise ConfigError(
                "a parameter group has the wrong keys", where=f"{_WHERE}[{index}]", got=", ".join(sorted(entry)),
                wanted=f"params, and any of {', '.join(_KEYS[1:])}",
            )  # fmt: skip
        params = entry["params"]
        for member in [params] if isinstance(params, nn.Parameter) else list(params):
            parameter = member[1] if isinstance(member, tuple) else member  # (name, parameter) is torch's too
            if not isinstance(parameter, nn.Parameter) or id(parameter) in found:
                what = "is in two groups" if isinstance(parameter, nn.Parameter) else "is no parameter"
                raise ConfigError(f"a member of a parameter group {what}", where=f"{_WHERE}[{index}]")
            found[id(parameter)] = {key: value for key, value in entry.items() if key != "params"}
    return found


def _settings(
    spec: ParameterSpec, optimizer: Optimizer, group: Mapping[str, Any], blocks: list[str]
) -> ParameterSettings:
    decay = optimizer.weight_decay if spec.parameter.dim() > 1 else 0.0
    settings = ParameterSettings(float(group.get("weight_decay", decay)))
    if isinstance(optimizer, Muon):
        is_matrix = _is_matrix(spec, group.get("use_muon"), blocks)
        rate = optimizer.muon_lr if is_matrix else optimizer.adam_lr
        settings = replace(settings, is_matrix=is_matrix, lr_scale=_share(rate, optimizer.lr))
    if group.get("lr") is not None:
        settings = replace(settings, lr_scale=_share(float(group["lr"]), optimizer.lr))
    return settings


def _share(rate: float | None, base: float) -> float:
    if rate is None or rate == base:
        return 1.0
    if not base:
        raise ConfigError(
            "a rate cannot be in proportion to a schedule of 0", where="optimizer.params.lr", got=base,
            wanted=f"more than 0, since a group has lr {rate}",
        )  # fmt: skip
    return rate / base


def _is_matrix(spec: ParameterSpec, asked: bool | None, blocks: list[str]) -> bool:
    """A matrix, or a stack of them, inside a block, no lookup table or convolution, unless the caller decides."""
    has_matrices = spec.parameter.dim() in (2, 3) and spec.parameter.numel() > 0
    if asked is None:
        asked = getattr(spec.parameter, "use_muon", None)
    if asked is not None:
        if asked and not has_matrices:
            raise ConfigError(
                "Muon updates matrices", where=spec.name, got=f"use_muon on shape {tuple(spec.parameter.shape)}",
                wanted="two dimensions, or three where the first counts matrices (experts)",
            )  # fmt: skip
        return bool(asked)
    inside = all(any(name.startswith(block + ".") for block in blocks) for name in (spec.name, *spec.aliases))
    is_other = any(isinstance(module, (nn.Embedding, _Convolution)) for module, _ in spec.places)
    return has_matrices and inside and not is_other
