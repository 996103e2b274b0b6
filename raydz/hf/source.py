"""What a conversion starts from, whoever wrote it: tensors by name and kind that are read one at a time.

Neighbours: `checkpoint_source.py`, `deepspeed.py`, `universal.py`, `dcp.py` and `folder.py` open one; `export.py` and
`checkpoint_writer.py` read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raydz.errors import CheckpointError

WEIGHT, BUFFER = "weight", "buffer"


@dataclass(frozen=True)
class SourceTensor:
    """A whole tensor that has not been read yet.

    Args:
        kind: as in a checkpoint: `weight`, `buffer`, or the name of an optimizer state.
        read: the tensor on the host, in `shape` and `dtype`; the caller may keep it or let it go.
    """

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class Source:
    """All of a checkpoint but the bytes of its tensors.

    Args:
        what: what it was found to be, in words.
        aliases: other names of tied parameters -> the name that is stored.
        step: committed optimizer steps.
        counters: of the engine; what is missing starts at zero.
        client: the caller's own state.
        model: sizes under the names of raydz's `model` section, where they are known.
        config_json: a Hugging Face `config.json`, where there is one.
        notes: what a person should know, above all what was left out.
    """

    what: str
    uri: str
    tensors: list[SourceTensor]
    aliases: dict[str, str] = field(default_factory=dict)
    step: int = 0
    counters: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    config_json: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def model_tensors(self) -> list[SourceTensor]:
        """Weights and buffers, in the source's order, each name once."""
        found = {item.name: item for item in self.tensors if item.kind == BUFFER}
        found |= {item.name: item for item in self.tensors if item.kind == WEIGHT}
        return [item for item in self.tensors if found.get(item.name) is item]

    def require_tensors(self) -> Source:
        """The source itself, if there is a weight in it.

        Raises:
            CheckpointError: there is none, or a tensor is there twice.
        """
        seen: set[tuple[str, str]] = set()
        for item in self.tensors:
            if (item.name, item.kind) in seen:
                raise CheckpointError("a tensor is there twice", where=self.uri, got=f"{item.name} ({item.kind})")
            seen.add((item.name, item.kind))
        if not any(item.kind == WEIGHT for item in self.tensors):
            raise CheckpointError("no weights here", where=self.uri, got=f"{self.what} with {len(seen)} tensors")
        return self
