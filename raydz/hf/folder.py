"""Hugging Face folders (one safetensors file or shards with an index) and single safetensors files, in any store.

Neighbours: `detect.py` opens one; `safetensors_file.py` reads; `llama.py` says what `config.json` means here.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from raydz.errors import CheckpointError
from raydz.hf.llama import model_section
from raydz.hf.safetensors_file import read_header, read_tensor
from raydz.hf.source import BUFFER, WEIGHT, Source, SourceTensor
from raydz.storage import Store

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_OUTPUT, _INPUT = "lm_head.weight", "model.embed_tokens.weight"


def is_hf_folder(store: Store) -> bool:
    """Whether safetensors files under Hugging Face's names are there."""
    return store.exists(INDEX) or store.exists(SINGLE)


def shard_keys(store: Store) -> list[str]:
    """The safetensors files of a folder."""
    return sorted(set(_weight_map(store).values())) if store.exists(INDEX) else [SINGLE]


def open_folder(store: Store) -> Source:
    """Open all shards.

    Raises:
        CheckpointError: a shard is missing, cut off, or lacks a tensor that the index names.
    """
    config = read_json(store, CONFIG) if store.exists(CONFIG) else None
    if store.exists(INDEX):
        placed = _weight_map(store)
        keys = sorted(set(placed.values()))
    else:
        placed, keys = None, [SINGLE]
    source = _open_files(store, keys)
    missing = sorted(set(placed or ()) - {item.name for item in source.tensors})
    if missing:
        raise CheckpointError(
            "the shards lack tensors that the index names", where=f"{store.uri}/{INDEX}", got=", ".join(missing[:5]),
            remedy="download the folder again",
        )  # fmt: skip
    source.config_json = config
    if config is not None:
        _add_config(source, config)
    return source


def open_single(store: Store, key: str) -> Source:
    """Open one file of any name."""
    source = _open_files(store, [key])
    source.what = "a safetensors file"
    return source


def _open_files(store: Store, keys: list[str]) -> Source:
    tensors: list[SourceTensor] = []
    aliases: dict[str, str] = {}
    for key in keys:
        entries, metadata = read_header(store, key)
        for entry in sorted(entries.values(), key=lambda entry: entry.start):
            kind = WEIGHT if entry.dtype.is_floating_point else BUFFER
            read = partial(read_tensor, store, key, entry)
            tensors.append(SourceTensor(entry.name, kind, entry.dtype, entry.shape, read))
        aliases |= json.loads(metadata.get("aliases", "{}"))
    what = f"a Hugging Face folder of {len(keys)} safetensors files"
    counters = {"global_steps": 0, "micro_steps": 0, "skipped_steps": 0, "skipped_in_row": 0}
    return Source(what, store.uri, tensors, aliases=aliases, counters=counters)


def _weight_map(store: Store) -> dict[str, str]:
    index = read_json(store, INDEX)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or any("/" in str(key) for key in placed.values()):
        raise CheckpointError("not an index of shards", where=f"{store.uri}/{INDEX}", wanted="weight_map: name to file")
    return placed


def read_json(store: Store, key: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: it is none.
    """
    try:
        value = json.loads(store.get(key))
    except ValueError as error:
        raise CheckpointError("not JSON", where=f"{store.uri}/{key}", got=error) from None
    if not isinstance(value, dict):
        raise CheckpointError("not a JSON object", where=f"{store.uri}/{key}", got=type(value).__name__)
    return value


def _add_config(source: Source, config: dict[str, Any]) -> None:
    names = {item.name for item in source.tensors}
    if config.get("tie_word_embeddings") and _INPUT in names and _OUTPUT not in names:
        source.aliases[_OUTPUT] = _INPUT
    section, lacking = model_section(config)
    if lacking:
        source.notes.append(f"raydz's own decoder cannot run this model: {', '.join(lacking)}; bring it with model=")
    else:
        source.model = section
