"""Dotted overrides: `train.steps=20`, `zero_optimization.stage=2`, `data.sources.0.path=corpus.txt`.

Layer 1. `load` applies them to the raw mapping, before validation, so that they are checked like any other value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from raydz.config.deepspeed import ALIASES
from raydz.config.faults import Fault, raise_faults
from raydz.config.secrets import find_secrets, looks_secret
from raydz.config.text import parse_yaml

_SOURCE = "overrides"


def apply_overrides(config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set each override in `config`, in order; sections that are missing are made.

    The right-hand side is YAML: `null`, `[a, b]`, `{lr: 1e-4}` and `5e7` mean what they mean in a file. Names may
    start with `deepspeed.`, and old names of DeepSpeed are understood.

    Raises:
        ConfigError: an override that is not `key=value`, that leads through a value, or holds a credential.
    """
    faults: list[Fault] = []
    for text in overrides:
        path, found, value = text.partition("=")
        if looks_secret(path) or not found or not all(path.strip().split(".")):
            faults.append(_malformed(text))
            continue
        parts = _canonical(path.strip()).split(".")
        leaked = list(find_secrets(value, (parts[-1],)))
        if leaked:
            faults.extend(Fault(".".join(parts), leak.what, leak.got, remedy=leak.remedy) for leak in leaked)
            continue
        fault = _set(config, parts, parse_yaml(value, f"override {path.strip()}"))
        faults.extend([fault] if fault else [])
    if faults:
        raise_faults(faults, _SOURCE)


def _malformed(text: str) -> Fault:
    # what follows the name may be anything, so it is not shown
    name = re.match(r"[\w.-]*", text)
    shown = "<hidden>" if looks_secret(text) or not name else repr(name[0])
    return Fault("override", "an override is not understood", got=shown, wanted="key.key=value")


def _canonical(path: str) -> str:
    path = path.removeprefix("deepspeed.")
    for old, new in ALIASES.items():
        if path == old or path.startswith(old + "."):
            return new + path.removeprefix(old)
    return path


def _set(config: dict[str, Any], parts: Sequence[str], value: Any) -> Fault | None:
    """Set one value; the fault if the way to it leads through something that is not a section."""
    node: Any = config
    for depth, part in enumerate(parts[:-1]):
        below = _child(node, part)
        if below is None and isinstance(node, dict):
            below = node[part] = {}
        if not isinstance(below, dict | list):
            path = ".".join(parts[: depth + 1])
            return Fault(".".join(parts), f"the override leads through {path}, which is not a section")
        node = below
    if isinstance(node, dict):
        node[parts[-1]] = value
    elif parts[-1].isdigit() and int(parts[-1]) < len(node):
        node[int(parts[-1])] = value
    else:
        return Fault(".".join(parts), "no such item in the list", wanted=f"an index below {len(node)}")
    return None


def _child(node: Any, part: str) -> Any:
    if isinstance(node, dict):
        return node.get(part)
    return node[int(part)] if part.isdigit() and int(part) < len(node) else None
