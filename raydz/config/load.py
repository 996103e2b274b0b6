"""From a file, dict or `Config` and overrides to one valid, resolved configuration, or to one error with all faults.

Layer 1. The entry to this package: `jobs/*.py`, `raydz.fit` and the CLI call `load`, `raydz.initialize` calls
`load_engine`. The way of a value: `text` -> `secrets` -> overrides -> `screen` -> `schema` | `engine` -> `resolve`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from raydz import log
from raydz.config.engine import EngineConfig, EngineSections
from raydz.config.faults import Fault, from_pydantic, raise_faults
from raydz.config.overrides import apply_overrides
from raydz.config.resolve import fill
from raydz.config.scheduler import WarmupCosineLR, WarmupDecayLR
from raydz.config.schema import Config
from raydz.config.screen import modernise, screen, table_tree
from raydz.config.secrets import find_secrets
from raydz.config.section import key_tree, merge_trees
from raydz.config.text import parse_json, parse_yaml
from raydz.errors import ConfigError

Source = str | Path | Mapping[str, Any]
_Sections = TypeVar("_Sections", bound=EngineSections)


def load(source: Source | Config, overrides: Sequence[str] = ()) -> Config:
    """The run that `source` describes, with `overrides` such as `train.steps=20` applied before anything is derived.

    `source` is a path (YAML, or JSON by its ending), a mapping or a `Config`. `deepspeed: <path or mapping>` in it is
    merged with its own DeepSpeed sections; the path is relative to the file. Keys of DeepSpeed without effect here
    are warned about by name.

    Raises:
        ConfigError: all faults at once, each with its dotted path: unknown keys, wrong kinds, refused features,
            literal credentials (never printed), sizes that do not fit together.
    """
    if isinstance(source, Config):
        if not overrides and source.run.name and source._given is not None:
            return source
        name, stem = "config", source._stem
        raw: Mapping[str, Any] = source.model_dump(exclude_unset=True) if source._given is None else source._given
        base_dir = Path.cwd()
    else:
        raw, name, base_dir = _read(source)
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).stem).strip("-._") if isinstance(source, str | Path) else ""
    given = _compose(raw, overrides, name, base_dir)
    config = _validate(Config, given, name)
    config._given, config._stem = given, stem or "run"
    filled = fill(config)
    _warn_of_long_warmup(filled)
    return filled


def load_engine(source: Source | Config | EngineConfig) -> EngineConfig:
    """The engine's part alone, from a DeepSpeed configuration as it stands (raydz's additions: `parallel`, `seed`).

    Raises:
        ConfigError: as `load`.
    """
    if isinstance(source, EngineConfig):
        return source
    if isinstance(source, Config):
        return source.engine()
    raw, name, base_dir = _read(source)
    given = _compose(raw, (), name, base_dir)
    # `checkpoint` is a section of DeepSpeed too
    foreign = [key for key in given if key in Config.model_fields.keys() - EngineConfig.model_fields - {"checkpoint"}]
    if foreign:
        remedy = "use raydz.fit, or load"
        raise_faults([Fault(key, "a section of a run, not of the engine", remedy=remedy) for key in foreign], name)
    engine = _validate(EngineConfig, given, name)
    _warn_of_long_warmup(engine)
    return engine


def check_trainable(config: Config | EngineConfig) -> None:
    """Refuse by name what can be written and planned with, but not trained with.

    Raises:
        ConfigError: names every such key.
    """
    if isinstance(config, Config) and not config.data.sources:
        fault = Fault("data.sources", "there is nothing to train on", wanted="at least one source of text")
        raise_faults([fault], "check before training")


def _read(source: Source) -> tuple[Mapping[str, Any], str, Path]:
    """The raw mapping, a name for messages, and the folder that paths in it are relative to."""
    if isinstance(source, Mapping):
        return source, "config", Path.cwd()
    path = Path(source).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError("the configuration cannot be read", where=str(path), got=reason) from None
    parse = parse_json if path.suffix in (".json", ".jsonc", ".hjson") else parse_yaml
    raw = parse(text, str(path))
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError("a configuration is a mapping of sections", where=str(path), got=type(raw).__name__)
    return raw, str(path), path.parent


def _compose(raw: Mapping[str, Any], overrides: Sequence[str], name: str, base_dir: Path) -> dict[str, Any]:
    """One mapping of the source, the DeepSpeed file it names and the overrides, free of secrets."""
    _refuse_secrets(raw, name)
    config = deepcopy(dict(raw))
    first = [text for text in overrides if text.partition("=")[0].strip() == "deepspeed"]
    if first:
        apply_overrides(config, first)
        base_dir = Path.cwd()
    config = _modern(_merge_deepspeed(config, name, base_dir), name)
    apply_overrides(config, [text for text in overrides if text not in first])
    config = _modern(config, name)
    _refuse_secrets(config, name)
    return config


def _modern(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    modern, faults = modernise(config)
    if faults:
        raise_faults(faults, name)
    return modern


def _refuse_secrets(value: Any, name: str) -> None:
    faults = list(find_secrets(value))
    if faults:
        raise_faults(faults, name)


def _merge_deepspeed(config: dict[str, Any], name: str, base_dir: Path) -> dict[str, Any]:
    inner = config.pop("deepspeed", None)
    if inner is None:
        return config
    inner_name = "deepspeed"
    if isinstance(inner, str):
        inner, inner_name, _ = _read(base_dir / Path(inner).expanduser())
        _refuse_secrets(inner, inner_name)
    if not isinstance(inner, Mapping):
        raise_faults([Fault("deepspeed", "must be a path or a section", got=type(inner).__name__)], name)
    inner = _modern(inner, inner_name)
    config = _modern(config, name)
    faults: list[Fault] = []
    _merge(config, inner, "", inner_name, faults)
    if faults:
        raise_faults(faults, name)
    return config


def _merge(into: dict[str, Any], extra: Mapping[str, Any], path: str, origin: str, faults: list[Fault]) -> None:
    for name, value in extra.items():
        if name not in into:
            into[name] = deepcopy(value)
        elif isinstance(into[name], dict) and isinstance(value, Mapping):
            _merge(into[name], value, f"{path}{name}.", origin, faults)
        else:
            remedy = "keep one of them; an override on the command line may replace either"
            faults.append(Fault(f"{path}{name}", f"given both here and in {origin}", remedy=remedy))


def _validate(model: type[_Sections], given: Mapping[str, Any], name: str) -> _Sections:
    fields = key_tree(model)
    result = screen(given, fields)
    try:
        config = model.model_validate(result.kept)
    except ValidationError as error:
        faults = [*result.faults, *from_pydantic(error, merge_trees(fields, table_tree()))]
        raise_faults(faults, name)
    if result.faults:
        raise_faults(result.faults, name)
    for note in result.notes:
        log.get(__name__).warning("%s: %s", name, note)
    return config


def _warn_of_long_warmup(config: EngineSections) -> None:
    scheduler = config.scheduler
    if not isinstance(scheduler, WarmupDecayLR | WarmupCosineLR):
        return
    total, warmup = scheduler.params.total_num_steps, scheduler.params.warmup_num_steps
    if total is not None and warmup >= total:
        log.get(__name__).warning(
            "scheduler.params.warmup_num_steps %d is not less than total_num_steps %d: lr never gets past its warm-up",
            warmup,
            total,
        )
