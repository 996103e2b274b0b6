"""Writing weights for others: a Hugging Face folder in shards, or one safetensors file.

Neighbours: `cli/convert.py` and `background.py` call this; `safetensors_file.py` streams each file; `llama.py` makes
the configuration. What commits a folder is written last: the index, or the only file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raydz.checkpoint import checkpoint_uri
from raydz.checkpoint.find import join_key
from raydz.errors import CheckpointError
from raydz.hf.folder import CONFIG, INDEX, SINGLE
from raydz.hf.llama import with_dtype
from raydz.hf.safetensors_file import Outgoing, write_tensors
from raydz.hf.source import Source, SourceTensor
from raydz.ops.rounding import split_master
from raydz.storage import Store

SHARD_BYTES = 5 * 10**9
Told = Callable[[int], None]


@dataclass(frozen=True)
class Export:
    """What was written: files by key, with their bytes."""

    uri: str
    files: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def _nobody(num_bytes: int) -> None:
    return None


def export_folder(
    source: Source,
    store: Store,
    folder: str = "",
    *,
    config_json: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    others: Mapping[str, bytes] | None = None,
    done: Told = _nobody,
) -> Export:
    """Write a folder that transformers loads. Memory: one tensor.

    Args:
        config_json: written as `config.json`; None: none.
        dtype: floating-point tensors are cast to it; None: as they are.
        shard_bytes: no shard is larger, except one that holds a single larger tensor.
        others: further small files by name, such as a tokenizer's.

    Raises:
        CheckpointError: there are weights in the folder already.
    """
    _refuse_weights(store, folder)
    tensors = _outgoing(source, dtype)
    shards = _shards(tensors, shard_bytes)
    for name, data in (others or {}).items():
        store.put(join_key(folder, name), data)
    if config_json is not None:
        text = json.dumps(with_dtype(config_json, _main_dtype(tensors)), indent=2)
        store.put(join_key(folder, CONFIG), text.encode())
    files: dict[str, int] = {}
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files[name] = write_tensors(store, join_key(folder, name), shard, _metadata(source), done)
        placed |= {item.name: name for item in shard}
    if len(shards) > 1:
        total = sum(item.num_bytes for item in tensors)
        index = {"metadata": {"total_size": total, **_metadata(source)}, "weight_map": dict(sorted(placed.items()))}
        store.put(join_key(folder, INDEX), json.dumps(index, indent=2).encode())
    return Export(checkpoint_uri(store, folder), files)


def _refuse_weights(store: Store, folder: str) -> None:
    for key in (INDEX, SINGLE):
        if store.exists(join_key(folder, key)):
            raise CheckpointError(
                "there are weights here already", where=f"{checkpoint_uri(store, folder)}/{key}",
                remedy="nothing is overwritten: name another folder",
            )  # fmt: skip


def export_single(
    source: Source, store: Store, key: str, *, dtype: torch.dtype | None = None, done: Told = _nobody
) -> Export:
    """Write all weights and buffers to one safetensors file; tied parameters are in it once. Memory: one tensor.

    Raises:
        CheckpointError: the file is there already.
    """
    if store.exists(key):
        raise CheckpointError("the file is there already", where=f"{store.uri}/{key}", remedy="name another file")
    size = write_tensors(store, key, _outgoing(source, dtype), _metadata(source), done)
    return Export(f"{store.uri.rstrip('/')}/{key}", {key: size})


def _metadata(source: Source) -> dict[str, str]:
    own = {"format": "pt", "step": str(source.step)}
    return own | ({"aliases": json.dumps(source.aliases)} if source.aliases else {})


def _outgoing(source: Source, dtype: torch.dtype | None) -> list[Outgoing]:
    items = source.require_tensors().model_tensors()
    return [Outgoing(item.name, _dtype(item, dtype), item.shape, partial(_cast, item, dtype)) for item in items]


def _dtype(item: SourceTensor, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and item.dtype.is_floating_point else item.dtype


def _cast(item: SourceTensor, wanted: torch.dtype | None) -> Tensor:
    """To bf16 by the rounding that training uses, so that an export holds the weights that were trained with."""
    tensor, dtype = item.read(), _dtype(item, wanted)
    if (tensor.dtype, dtype) == (torch.float32, torch.bfloat16):
        return split_master(tensor.contiguous())[0]
    return tensor.to(dtype)


def _main_dtype(tensors: Sequence[Outgoing]) -> torch.dtype:
    floating = [item for item in tensors if item.dtype.is_floating_point]
    return max(floating, key=lambda item: item.num_bytes).dtype if floating else torch.float32


def _shards(tensors: Sequence[Outgoing], most_bytes: int) -> list[list[Outgoing]]:
    shards: list[list[Outgoing]] = [[]]
    total = 0
    for item in tensors:
        if shards[-1] and total + item.num_bytes > most_bytes:
            shards.append([])
            total = 0
        shards[-1].append(item)
        total += item.num_bytes
    return shards
