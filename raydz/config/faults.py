"""All faults of a configuration at once, each with its dotted path, as one `ConfigError`.

Layer 1. `load` collects `Fault`s from the secrets scan, the DeepSpeed table and pydantic, and raises them here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from pydantic import ValidationError

from raydz.config.section import KeyTree
from raydz.errors import ConfigError

_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a pair",
    "dict_type": "a section (keys and values)",
    "model_type": "a section (keys and values)",
    "model_attributes_type": "a section (keys and values)",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "text like {pattern}",
    "union_tag_invalid": "{expected_tags}",
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, in the fields of `RaydzError`."""

    path: str
    what: str
    got: str | None = None
    wanted: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        details = [f"{label} {text}" for label, text in (("got", self.got), ("wanted", self.wanted)) if text]
        text = f"{self.path}: {self.what}" + (f" ({', '.join(details)})" if details else "")
        return f"{text}; {self.remedy}" if self.remedy else text


class Unfit(ValueError):
    """Raised in a pydantic validator: values that are fine alone and do not fit together.

    The faults' paths are relative to the section that the validator belongs to.
    """

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = faults


def raise_faults(faults: Sequence[Fault], source: str) -> NoReturn:
    """Raise one `ConfigError` for all of `faults`; `source` is the file they were found in."""
    if len(faults) == 1:
        fault = faults[0]
        raise ConfigError(
            fault.what, where=f"{fault.path} ({source})", got=fault.got, wanted=fault.wanted, remedy=fault.remedy
        )
    listing = "".join(f"\n  - {fault}" for fault in faults)
    raise ConfigError(f"the configuration has {len(faults)} faults:{listing}", where=source)


def from_pydantic(error: ValidationError, tree: KeyTree) -> list[Fault]:
    """What pydantic found, in our words: one fault a path, unknown keys with the closest known one."""
    merged: dict[tuple[str, str], Fault] = {}
    for line in error.errors(include_url=False):
        for fault in _translate(dict(line), tree):
            key = (fault.path, fault.what)
            known = merged.get(key)
            # a union reports each member that did not fit: one fault that wants either
            if known and fault.wanted and fault.wanted not in (known.wanted or ""):
                merged[key] = replace(known, wanted=f"{known.wanted} or {fault.wanted}")
            elif not known:
                merged[key] = fault
    return list(merged.values())


def _translate(line: dict[str, Any], tree: KeyTree) -> Iterator[Fault]:
    kind, location, context = line["type"], line["loc"], line.get("ctx", {})
    if kind == "extra_forbidden":
        yield unknown_key([*_known_part(location[:-1], tree), str(location[-1])], tree)
        return
    parts = _known_part(location, tree)
    raised = context.get("error")
    if isinstance(raised, Unfit):
        for fault in raised.faults:
            yield replace(fault, path=".".join([*parts, *([fault.path] if fault.path else [])]))
        return
    if kind in ("missing", "union_tag_not_found"):
        path = [*parts, "type"] if kind == "union_tag_not_found" else parts
        yield Fault(".".join(path), "a required key is missing")
        return
    path = [*parts, "type"] if kind == "union_tag_invalid" else parts
    got = context["tag"] if kind == "union_tag_invalid" else line["input"]
    wanted = _WANTED[kind].format(**context) if kind in _WANTED else str(line["msg"])
    yield Fault(".".join(path), "wrong value", got=_shorten(repr(got)), wanted=wanted)


def _known_part(location: Iterable[int | str], tree: KeyTree) -> list[str]:
    """The location without the names that pydantic adds for members of a union."""
    parts: list[str] = []
    for part in location:
        if isinstance(part, int):
            parts.append(str(part))
        elif part in tree or "*" in tree:
            tree = tree.get(part, tree.get("*", {}))
            parts.append(part)
    return parts


def unknown_key(parts: Sequence[str], tree: KeyTree) -> Fault:
    """The fault for a key nobody knows: the closest sibling, or the section where a key of that name lives."""
    siblings = tree
    for part in parts[:-1]:
        if not part.isdigit():
            siblings = siblings.get(part, siblings.get("*", {}))
    name = parts[-1]
    elsewhere = [".".join(path) for path in _paths(tree) if path[-1] == name and len(path) > 1]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    remedy = None
    if elsewhere:
        remedy = f"a key of this name belongs at {' or '.join(elsewhere[:3])}"
    elif close:
        remedy = f"did you mean {close[0]}?"
    elif siblings:
        remedy = f"known keys here: {', '.join(sorted(siblings)[:40])}"
    return Fault(".".join(parts), "unknown key", remedy=remedy)


def _paths(tree: KeyTree, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, below in tree.items():
        yield (*prefix, name)
        yield from _paths(below, (*prefix, name))


def _shorten(text: str, limit: int = 100) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
