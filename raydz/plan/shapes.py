"""Names and shapes of parameters and the units they are gathered in, by arithmetic alone: no torch, no model.

Neighbours: `groups.py` cuts units into flat groups; `model.py` makes `DecoderSizes` from a configuration. The rules are
those of `models/decoder.py` and `zero/units.py`, and a test compares the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from raydz.errors import ConfigError


@dataclass(frozen=True)
class ParameterShape:
    """A parameter under its first name; `aliases` are the other places that share it.

    Args:
        compute_bytes: of an element in forward and backward; None is the configured precision's.
        is_matrix: what Muon updates as a whole, with fewer states.
    """

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    compute_bytes: int | None = None
    is_matrix: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitShape:
    """Parameters that are gathered together ("" is the root); `is_lookup`: backward does not need the weights."""

    name: str
    parameters: tuple[ParameterShape, ...]
    is_lookup: bool = False

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class DecoderSizes:
    """What decides the shapes of raydz's decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    is_tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_size(self) -> int:
        """Width of keys, and of values, of one position."""
        return self.num_kv_heads * self.head_dim

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in decoder_parameters(self))


def decoder_parameters(sizes: DecoderSizes) -> Iterator[ParameterShape]:
    """Every parameter of the decoder, in module order."""
    hidden, inner, kv = sizes.hidden_size, sizes.intermediate_size, sizes.kv_size
    head = "lm_head.weight"
    table = (sizes.vocab_size, hidden)
    yield ParameterShape("model.embed_tokens.weight", table, (head,) if sizes.is_tied else ())
    block = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(sizes.num_layers):
        for name, shape in block.items():
            yield ParameterShape(f"model.layers.{layer}.{name}.weight", shape, is_matrix=len(shape) == 2)
    yield ParameterShape("model.norm.weight", (hidden,))
    if not sizes.is_tied:
        yield ParameterShape(head, table)


def decoder_units(
    sizes: DecoderSizes, patterns: Sequence[str] | None = None, fp32_modules: Sequence[str] = ()
) -> list[UnitShape]:
    """The decoder's units, the root first: blocks, embedding and head, or the modules that `patterns` name.

    Args:
        fp32_modules: patterns of modules whose parameters take four bytes whatever the precision.

    Raises:
        ConfigError: a pattern matches no module.
    """
    parameters = list(decoder_parameters(sizes))
    modules = _modules(parameters)
    names = [n for n in modules if n in ("model.embed_tokens", "lm_head") or _is_block(n)]
    if patterns:
        names = _matching(modules, patterns, "parallel.units")
    wide = set(_matching(modules, fp32_modules, "parallel.fp32_modules"))
    parameters = [replace(p, compute_bytes=4) if wide & set(_prefixes(p.name)) else p for p in parameters]
    members: dict[str, list[ParameterShape]] = {name: [] for name in ("", *names)}
    for parameter in parameters:
        members[_common_unit(parameter, members)].append(parameter)
    return [
        UnitShape(name, tuple(found), is_lookup=name == "model.embed_tokens")
        for name, found in members.items()
        if found or name == ""
    ]


def _matching(modules: Sequence[str], patterns: Sequence[str], key: str) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ConfigError(
                "no module with parameters has this name", where=key, got=pattern,
                remedy="for example " + ", ".join(modules[1:4]),
            )  # fmt: skip
    return [name for name in modules if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _is_block(name: str) -> bool:
    return name.startswith("model.layers.") and name.count(".") == 2


def _prefixes(name: str) -> list[str]:
    """Modules around a parameter, the outermost first, without the root."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _modules(parameters: Sequence[ParameterShape]) -> list[str]:
    """Every module that holds parameters, in module order."""
    names = [parameter.name for parameter in parameters]
    names += [alias for parameter in parameters for alias in parameter.aliases]
    return list(dict.fromkeys(prefix for name in names for prefix in _prefixes(name)))


def _common_unit(parameter: ParameterShape, units: dict[str, list[ParameterShape]]) -> str:
    """The deepest unit that contains the parameter under all of its names."""
    shared = set(units)
    for name in (parameter.name, *parameter.aliases):
        shared &= {"", *_prefixes(name)}
    return max(shared, key=len)
