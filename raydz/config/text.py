"""Configuration text to plain mappings: YAML whose numbers are numbers, JSON as DeepSpeed's users write it.

Layer 1. Used by `load` for files and for the right-hand side of overrides.

YAML follows version 1.2 for scalars: `5e7` and `1e-4` are numbers, only `true` and `false` are booleans, dates are
text. JSON may hold `//`, `/* */` and `#` comments and trailing commas. A key given twice is an error in both. Messages
give line and column, never a piece of the text: it may hold what must not be printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from raydz.errors import ConfigError

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$|^0x[0-9a-fA-F]+$|^0o[0-7]+$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 and without repeated keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                self.repeated.append(f"{key.value} (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        digits = self.construct_scalar(node)
        return int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)

    def construct_float(self, node: yaml.ScalarNode) -> float:
        digits = self.construct_scalar(node).lower().replace("_", "")
        return float(digits.replace(".inf", "inf").replace(".nan", "nan"))


def _scalars() -> Iterator[tuple[str, re.Pattern[str], str]]:
    # order matters: every whole number also matches the pattern of floats
    yield "tag:yaml.org,2002:bool", _BOOL, "tTfF"
    yield "tag:yaml.org,2002:int", _INT, "-+0123456789"
    yield "tag:yaml.org,2002:float", _FLOAT, "-+0123456789."
    yield "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN"
    yield "tag:yaml.org,2002:merge", re.compile(r"^<<$"), "<"


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _scalars():
    _Loader.add_implicit_resolver(_tag, _pattern, [*_first, ""] if _tag.endswith("null") else list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_float)


def parse_yaml(text: str, source: str) -> Any:
    """The value that `text` says.

    Raises:
        ConfigError: not YAML, a repeated key, or a tag that would build an object.
    """
    loader = _Loader(text)
    try:
        value = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise ConfigError("the text is not YAML", where=place, got=_reason(error)) from None
    except yaml.YAMLError:
        raise ConfigError("the text is not YAML", where=source, got="characters that YAML forbids") from None
    finally:
        loader.dispose()
    _refuse_repeated(loader.repeated, source)
    return value


def _reason(error: yaml.MarkedYAMLError) -> str:
    # PyYAML quotes names in some problems ("undefined alias 'x'"): what stands in quotes stays out
    return re.sub(r"'[^']{2,}'", "'...'", error.problem or "unreadable")


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys came twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.repeated = sorted({name for name in names if names.count(name) > 1})


def parse_json(text: str, source: str) -> Any:
    """The value that `text` says.

    Raises:
        ConfigError: not JSON even with comments and trailing commas removed, or a repeated key.
    """
    try:
        value = json.loads(_strip(text), object_pairs_hook=_Object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        place = f"{source}, line {error.lineno}, column {error.colno}"
        raise ConfigError("the text is not JSON", where=place, got=error.msg) from None
    except ValueError as error:
        raise ConfigError("the text is not JSON", where=source, got=str(error)) from None
    _refuse_repeated(list(_repeated_below(value, "")), source)
    return _plain(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _repeated_below(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, _Object):
        yield from (f"{path}{name}" for name in value.repeated)
        for name, below in value.items():
            yield from _repeated_below(below, f"{path}{name}.")
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _repeated_below(below, f"{path}{index}.")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(below) for name, below in value.items()}
    return [_plain(below) for below in value] if isinstance(value, list) else value


_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])')


def _strip(text: str) -> str:
    """Without comments and trailing commas; every line keeps its number."""

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)

    return _STRING_OR_COMMA.sub(blank, _TOKEN.sub(blank, text))


def _refuse_repeated(repeated: list[str], source: str) -> None:
    if repeated:
        raise ConfigError(
            "a key is given twice", where=source, got=", ".join(repeated), remedy="keep one of the two values"
        )
