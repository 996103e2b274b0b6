"""What all sections of the configuration share: frozen pydantic models that know their keys.

Layer 1. Below `engine` and `schema` (the sections themselves); `faults` reads the key tree to name paths.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

KeyTree = dict[str, "KeyTree"]
"""Known keys by name, with what may lie below each; `*` stands for names the user chooses."""


class Section(BaseModel):
    """A mapping whose keys are all known. Strict: `"5"` is not a number, `true` is not `1`, `5e8` is a whole number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)


def _whole(value: Any) -> Any:
    """`5e8` is how people write a count; anything else is left for the type check to refuse."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _pair(value: Any) -> Any:
    """Lists are all that YAML and JSON have."""
    return tuple(value) if isinstance(value, list) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
FractionPair = Annotated[tuple[Fraction, Fraction], BeforeValidator(_pair)]
PositivePair = Annotated[tuple[Positive, Positive], BeforeValidator(_pair)]


def key_tree(model: type[BaseModel]) -> KeyTree:
    """Every key that `model` and the sections inside it know."""
    return {name: _below(field.annotation) for name, field in model.model_fields.items()}


def _below(annotation: Any) -> KeyTree:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return key_tree(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Annotated, list):
        return _below(arguments[0])
    if origin is dict:
        return {"*": _below(arguments[1])}
    tree: KeyTree = {}
    if origin in (Union, UnionType):
        for member in arguments:
            tree = merge_trees(tree, _below(member))
    return tree


def merge_trees(first: KeyTree, second: KeyTree) -> KeyTree:
    """The keys of both."""
    merged = dict(first)
    for name, below in second.items():
        merged[name] = merge_trees(merged.get(name, {}), below)
    return merged
