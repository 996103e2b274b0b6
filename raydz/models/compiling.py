"""torch.compile, block by block: one graph for all blocks of a shape, with the gathers of `zero/` outside of it.

Neighbours: `train/build.py` calls this for `model.compile`; `blocks.py` puts the forward in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.compiler import list_backends

from raydz.errors import ConfigError
from raydz.models.blocks import BlockForward, find_blocks


def compile_blocks(model: nn.Module, backend: str = "inductor", patterns: Sequence[str] | None = None) -> list[str]:
    """Compile the forward and backward of every block for training; returns their names.

    Compiled when first called. A block that Python leaves in the middle (a graph break) is an error of torch's. May be
    combined with `wrap_blocks`, in any order: recomputation is then part of what is compiled.

    Args:
        backend: a name that torch knows.
        patterns: `parallel.units`, where it is set.

    Raises:
        ConfigError: torch has no such backend, or the model has no blocks.
    """
    known = list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            "torch.compile has no such backend", where="model.compile_backend", got=backend, wanted=", ".join(known)
        )
    blocks = find_blocks(model, patterns)
    if not blocks:
        raise ConfigError("the model has no blocks to compile", where="model.compile", remedy="see parallel.units")
    for block in blocks:
        BlockForward.of(block.module).compile(backend)
    return [block.name for block in blocks]
