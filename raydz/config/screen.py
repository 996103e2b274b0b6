"""A raw configuration walked along DeepSpeed's table: old spellings made new, `auto` dropped, verdicts carried out.

Layer 1. Between `text` (plain mappings) and the pydantic models of `engine` and `schema`: what leaves here holds only
keys that the models know, or that nobody knows (and the models then refuse, with the closest match).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raydz.config.deepspeed import ALIASES, KEYS, REFUSED_VALUES, Key
from raydz.config.faults import Fault
from raydz.config.section import KeyTree


@dataclass
class Screened:
    """What is left for the models, and what there is to say about the rest."""

    kept: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def table_tree() -> KeyTree:
    """DeepSpeed's keys as a tree, to suggest from."""
    tree: KeyTree = {}
    for path in KEYS:
        node = tree
        for part in path.split("."):
            node = node.setdefault(part, {})
    return tree


def modernise(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """The same configuration in today's spelling: aliases, `zero_optimization: true`, `cpu_offload` and its kin."""
    config, faults = dict(raw), list[Fault]()
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        config["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        config["zero_optimization"] = dict(zero)
    if isinstance(config.get("scheduler"), Mapping) and config["scheduler"].get("type", "") is None:
        config["scheduler"] = None
    for old, new in ALIASES.items():
        _rename(config, old, new, faults)
    if isinstance(config.get("zero_optimization"), dict):
        _modernise_offload(config["zero_optimization"], faults)
    return config, faults


def _rename(config: dict[str, Any], old: str, new: str, faults: list[Fault]) -> None:
    *parents, name = old.split(".")
    for parent in parents:
        config = config.get(parent, {})
    if not isinstance(config, dict) or name not in config:
        return
    value, target = config.pop(name), new.rpartition(".")[2]
    if target in config:
        faults.append(Fault(old, f"given together with {new}, which is the same key", remedy="keep one of them"))
    config.setdefault(target, value)


def _modernise_offload(zero: dict[str, Any], faults: list[Fault]) -> None:
    """DeepSpeed's offload keys from before there was a section for it."""
    pin_memory = zero.pop("cpu_offload_use_pin_memory", None)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        asked = zero.pop(old, None)
        if asked is None:
            continue
        if new in zero:
            faults.append(Fault(f"zero_optimization.{old}", f"given together with {new}", remedy=f"keep {new}"))
        elif asked:
            zero[new] = {"device": "cpu"} | ({} if pin_memory is None else {"pin_memory": pin_memory})


def screen(raw: Mapping[str, Any], fields: KeyTree) -> Screened:
    """Carry out the table's verdicts on `raw`; `fields` are the keys that the models know."""
    result = Screened()
    result.kept = _screen_section(raw, fields, (), result)
    return result


def _screen_section(raw: Mapping[str, Any], fields: KeyTree, path: tuple[str, ...], result: Screened) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        here = (*path, str(name))
        row = KEYS.get(".".join(here))
        if row is None and isinstance(value, Mapping) and (fields.get(name) or _has_rows_below(here)):
            below = _screen_section(value, fields.get(name, {}), here, result)
            if not _names_what_we_lack(here, value, result) and (below or name in fields):
                kept[name] = below
        elif row is None:
            # an empty section (all its keys commented out) is one that is not there
            if value is not None or not fields.get(name):
                kept[name] = value
        elif _judge(row, value, result) and name in fields and value != "auto":
            kept[name] = value
    return kept


def _has_rows_below(path: tuple[str, ...]) -> bool:
    prefix = ".".join(path) + "."
    return any(known.startswith(prefix) for known in KEYS)


def _judge(row: Key, value: Any, result: Screened) -> bool:
    """Say what the verdict has to say; whether the key may stay."""
    if row.verdict == "refused" and row.asks_for_something(value):
        result.faults.append(Fault(row.path, "raydz does not do this", remedy=f"remove the key: {row.reason}"))
        return False
    if row.verdict == "no effect" and row.asks_for_something(value):
        result.notes.append(f"{row.path} has no effect here: {row.reason}")
    return True


def _names_what_we_lack(path: tuple[str, ...], section: Mapping[str, Any], result: Screened) -> bool:
    """Whether `type` names one of DeepSpeed's that raydz lacks; its parameters would only add noise."""
    named = f"{path[-1]}.type"
    chosen = section.get("type")
    reason = REFUSED_VALUES.get(named, {}).get(chosen.lower()) if isinstance(chosen, str) else None
    if reason:
        result.faults.append(Fault(named, "raydz does not have this type", got=repr(chosen), remedy=reason))
    return reason is not None
