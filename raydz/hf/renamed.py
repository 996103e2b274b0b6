"""A source under other names: the key map of a load, applied while converting.

Neighbours: `cli/convert.py` calls `rename_source`; `checkpoint/key_map.py` has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raydz.checkpoint import KeyMap
from raydz.checkpoint.key_map import rename_names
from raydz.hf.source import Source


@dataclass(frozen=True)
class Renames:
    """What a key map did: {new name: stored name} of what changed, and the rules that met nothing."""

    renamed: dict[str, str]
    idle: list[str]


def rename_source(source: Source, key_map: KeyMap) -> Renames:
    """Rename the source's tensors and ties in place, all kinds of a tensor alike.

    Raises:
        CheckpointError: two stored names would become one.
    """
    stored = list(dict.fromkeys(item.name for item in source.tensors))
    new, idle = rename_names(key_map, stored, source.aliases, source.uri)
    source.tensors = [replace(item, name=new[item.name]) for item in source.tensors]
    source.aliases = {new[alias]: new[name] for alias, name in source.aliases.items()}
    return Renames({new[name]: name for name in stored if new[name] != name}, idle)
