"""Renamed parameters: which stored name is which of the model's, by exact names and regular expressions.

Neighbours: `selection.py` renames a manifest's tensors with one before anything is planned; `access.py` and
`train/resume.py` take it from code or a JSON file. See the note "Renamed parameters" in README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raydz.checkpoint.manifest import Manifest
from raydz.errors import CheckpointError, ConfigError

_FORM = '{"exact": {"stored.name": "model.name"}, "regex": {"^stored\\\\.(\\\\d+)": "model.\\\\1"}}'


@dataclass(frozen=True)
class KeyMap:
    """Stored name -> the model's name, for every kind of a tensor alike.

    An exact name counts before the expressions; of these the first that is found anywhere in the name counts, and all
    its places are replaced, as `re.sub` does.
    """

    exact: Mapping[str, str]
    regex: Mapping[str, str]

    @classmethod
    def of(cls, given: Any, where: str = "key_map") -> KeyMap:
        """From `{"exact": {…}, "regex": {…}}`, either of them, or from plain `{stored: model}` pairs.

        Raises:
            ConfigError: another form, or an expression that is none.
        """
        if isinstance(given, KeyMap):
            return given
        has_parts = isinstance(given, Mapping) and bool(given) and set(given) <= {"exact", "regex"}
        parts = given if has_parts and all(isinstance(v, Mapping) for v in given.values()) else {"exact": given}
        pairs = {name: parts.get(name, {}) for name in ("exact", "regex")}
        for mapping in pairs.values():
            fits = isinstance(mapping, Mapping) and all(isinstance(x, str) for pair in mapping.items() for x in pair)
            if not fits:
                raise ConfigError("not a map of parameter names", where=where, got=given, wanted=_FORM)
        for pattern, replacement in pairs["regex"].items():
            try:
                re.sub(re.compile(pattern), replacement, "")
                re.compile(f"{pattern}|").sub(replacement, "")  # also groups that the replacement names
            except (re.error, IndexError) as error:
                raise ConfigError(
                    "not a regular expression and its replacement", where=where, got=f"{pattern!r}: {error}",
                    wanted=_FORM,
                ) from None  # fmt: skip
        return cls(**pairs)

    @classmethod
    def from_file(cls, path: str | Path) -> KeyMap:
        """From a JSON file.

        Raises:
            ConfigError: it cannot be read, or is not a key map.
        """
        try:
            given = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError("the key map cannot be read", where=str(path), got=error, wanted=_FORM) from None
        return cls.of(given, str(path))

    def as_dict(self) -> dict[str, dict[str, str]]:
        """What `of` takes."""
        return {"exact": dict(self.exact), "regex": dict(self.regex)}

    def rename(self, name: str) -> tuple[str, str | None]:
        """The model's name, and the rule that gave it."""
        if name in self.exact:
            return self.exact[name], name
        for pattern, replacement in self.regex.items():
            renamed, count = re.subn(pattern, replacement, name)
            if count:
                return renamed, pattern
        return name, None


def rename_names(
    key_map: KeyMap, stored: Iterable[str], aliases: Mapping[str, str], where: str
) -> tuple[dict[str, str], list[str]]:
    """{stored name: the model's} of all stored names, tied ones too, and the rules that met nothing.

    Raises:
        CheckpointError: two stored names would become one.
    """
    new: dict[str, str] = {}
    used: set[str] = set()
    came_from: dict[str, str] = {}
    for name in stored:
        new[name], rule = key_map.rename(name)
        used.update([] if rule is None else [rule])
        if came_from.setdefault(new[name], name) != name:
            raise CheckpointError(
                "the key map makes two stored tensors one", where=where,
                got=f"{came_from[new[name]]} and {name} -> {new[name]}", wanted="different names",
                remedy="make the key map's rules more exact",
            )  # fmt: skip
    for name in (*aliases, *aliases.values()):
        new[name], rule = key_map.rename(name)
        used.update([] if rule is None else [rule])
    return new, [rule for rule in (*key_map.exact, *key_map.regex) if rule not in used]


def rename_tensors(manifest: Manifest, key_map: KeyMap, where: str) -> tuple[Manifest, dict[str, str], list[str]]:
    """The manifest under the model's names, {model's name: stored name} of what changed, and rules that met nothing.

    Raises:
        CheckpointError: two stored names would become one.
    """
    stored = list(dict.fromkeys(name for name, _ in manifest.tensors))
    new, idle = rename_names(key_map, stored, manifest.aliases, where)
    tensors = {(new[name], kind): replace(entry, name=new[name]) for (name, kind), entry in manifest.tensors.items()}
    aliases = {new[alias]: new[name] for alias, name in manifest.aliases.items()}
    renamed = {new[name]: name for name in stored if new[name] != name}
    return replace(manifest, tensors=tensors, aliases=aliases), renamed, idle
