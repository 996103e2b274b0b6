"""Which parameters are gathered together: blocks, untied embeddings and heads, and a root unit for the rest.

Neighbours: `sharded.py` builds flat groups from this; `hooks.py` puts hooks on each unit's module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from raydz.errors import ConfigError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(eq=False)
class ParameterSpec:
    """A parameter and every place it is registered; `name` is the first, the others are `aliases`."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]
    aliases: list[str] = field(default_factory=list)

    def replace(self, parameter: nn.Parameter) -> None:
        """Register another Parameter in every place of this one."""
        for module, attribute in self.places:
            module._parameters[attribute] = parameter
        self.parameter = parameter


def matches(spec: ParameterSpec, pattern: str) -> bool:
    """Whether a shell pattern fits one of the parameter's names, or the name of a module around it."""
    for name in (spec.name, *spec.aliases):
        parts = name.split(".")
        if any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1)):
            return True
    return False


@dataclass(eq=False)
class UnitSpec:
    """A module whose forward uses `parameters` and no other unit's ("" is the root)."""

    name: str
    module: nn.Module
    parameters: list[ParameterSpec]

    @property
    def is_lookup(self) -> bool:
        """Whether backward does not need the weights: an embedding table, and nothing else."""
        module = self.module
        is_plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
        return is_plain and list(module._parameters) == ["weight"] and not module._modules


def find_units(model: nn.Module, patterns: Sequence[str] | None = None) -> list[UnitSpec]:
    """Divide the parameters of `model` into units, in module order, the root first.

    Without `patterns` each child of the outermost `nn.ModuleList`s is a unit, and so is every `nn.Embedding` and
    output head (an `nn.Linear` outside the lists with as many rows as an embedding). A parameter that is registered in
    several places belongs to the unit of their lowest common ancestor.

    Args:
        patterns: shell patterns of module names that become units instead.

    Raises:
        ConfigError: a pattern matches no module with parameters, or a container, whose forward never runs.
    """
    modules = dict(model.named_modules())
    names = _matching(modules, patterns) if patterns else _automatic(model, modules)
    units = {name: UnitSpec(name, modules[name], []) for name in ("", *names)}
    by_path = dict(model.named_modules(remove_duplicate=False))
    for spec in parameter_specs(model):
        units[_common_unit([spec.name, *spec.aliases], units, by_path)].parameters.append(spec)
    found = [unit for unit in units.values() if unit.parameters or unit.name == ""]
    for unit in found[1:]:
        if isinstance(unit.module, _CONTAINERS):
            raise ConfigError(
                "a container is never called, so it cannot be a unit", where="parallel.units",
                got=f"{unit.name} ({type(unit.module).__name__})", wanted="modules with a forward",
                remedy=f"name what it contains, for example {unit.name}.0",
            )  # fmt: skip
    return found


def _matching(modules: dict[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    candidates = [name for name, module in modules.items() if name and any(True for _ in module.parameters())]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in candidates):
            raise ConfigError(
                "no module with parameters has this name", where="parallel.units", got=pattern,
                wanted="a pattern of module names", remedy="for example " + ", ".join(candidates[:3]),
            )  # fmt: skip
    return [name for name in candidates if any(fnmatchcase(name, p) for p in patterns)]


def _automatic(model: nn.Module, modules: dict[str, nn.Module]) -> list[str]:
    blocks = block_names(model)
    vocabularies = {m.num_embeddings for m in modules.values() if isinstance(m, nn.Embedding)}
    ends = [
        name
        for name, module in modules.items()
        if (isinstance(module, nn.Embedding) or getattr(module, "out_features", None) in vocabularies)
        and not any(name == block or name.startswith(block + ".") for block in blocks)
        and name
    ]
    chosen = {name for name in blocks if name in modules} | set(ends)
    return [name for name in modules if name in chosen]


def block_names(model: nn.Module) -> list[str]:
    """The children of the outermost `nn.ModuleList`s."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        inside = any(name == block or name.startswith(block + ".") for block in blocks)
        if isinstance(module, nn.ModuleList) and not inside:
            blocks += [f"{name}.{child}" if name else child for child, _ in module.named_children()]
    return blocks


def parameter_specs(model: nn.Module) -> list[ParameterSpec]:
    """Every parameter once, in module order."""
    specs: dict[int, ParameterSpec] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{module_name}.{attribute}" if module_name else attribute
            spec = specs.setdefault(id(parameter), ParameterSpec(name, parameter, []))
            if name != spec.name:
                spec.aliases.append(name)
            if not any(place[0] is module and place[1] == attribute for place in spec.places):
                spec.places.append((module, attribute))
    return list(specs.values())


def _common_unit(names: list[str], units: dict[str, UnitSpec], by_path: dict[str, nn.Module]) -> str:
    """The deepest unit whose module contains every one of the parameter names (a module may have several paths)."""
    unit_of = {id(unit.module): unit.name for unit in units.values()}
    shared = set(units)
    for name in names:
        parts = name.split(".")[:-1]
        paths = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
        shared &= {unit_of[id(by_path[path])] for path in paths if id(by_path[path]) in unit_of}
    return max(shared, key=len)
