"""Checks a Kubernetes manifest against `fields.yaml`: unknown names, wrong kinds of values, missing fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_KINDS = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}


def load_types() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "fields.yaml").read_text())


def faults(manifest: dict[str, Any], types: dict[str, Any]) -> list[str]:
    """One line for each mistake, with its path."""
    return list(_check(manifest, types[manifest["kind"]], types, manifest["kind"]))


def _check(value: Any, wanted: Any, types: dict[str, Any], path: str) -> Iterator[str]:
    wanted = types.get(wanted, wanted) if isinstance(wanted, str) else wanted
    if isinstance(wanted, dict):
        yield from _check_fields(value, wanted, types, path)
    elif wanted.startswith("["):
        if not isinstance(value, list):
            yield f"{path}: a list is wanted"
            return
        for index, item in enumerate(value):
            yield from _check(item, wanted[1:-1], types, f"{path}[{index}]")
    elif wanted.startswith("{"):
        if not isinstance(value, dict):
            yield f"{path}: a mapping is wanted"
            return
        for key, item in value.items():
            yield from _check(item, wanted[1:-1], types, f"{path}.{key}")
    elif not _fits(value, wanted):
        yield f"{path}: {value!r} is not {wanted}"


def _check_fields(value: Any, wanted: dict[str, Any], types: dict[str, Any], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: a mapping is wanted"
        return
    known = {name.rstrip("!"): kind for name, kind in wanted.items()}
    for name, item in value.items():
        if name not in known:
            yield f"{path}.{name}: no such field"
        else:
            yield from _check(item, known[name], types, f"{path}.{name}")
    for name in wanted:
        if name.endswith("!") and name[:-1] not in value:
            yield f"{path}.{name[:-1]}: missing"


def _fits(value: Any, wanted: str) -> bool:
    if wanted == "any":
        return True
    if wanted == "quantity":
        return _QUANTITY.fullmatch(str(value)) is not None and not isinstance(value, bool)
    if wanted in _KINDS:
        return isinstance(value, _KINDS[wanted]) and (wanted == "boolean" or not isinstance(value, bool))  # type: ignore[arg-type]
    return value in wanted.split("|")
