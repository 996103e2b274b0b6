"""Sizes the engine works with, with defaults that scale with the model.

Neighbours: `engine.py` maps the configuration onto this; `sharded.py` and `schedule.py` obey it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raydz.zero.units import UnitSpec

_LARGEST_BUCKET = 500_000_000
_LARGEST_PREFETCH = 50_000_000
_LARGEST_PERSISTENT = 100_000
_UNLIMITED = 1_000_000_000


@dataclass(frozen=True)
class ZeroSizes:
    """`ZeroOptions` with nothing left open."""

    bucket_numel: int
    prefetch_numel: int
    persistence_numel: int
    max_live_numel: int
    wire_dtype: torch.dtype | None


@dataclass(frozen=True)
class ZeroOptions:
    """Element counts; None is scaled with the model by `resolved`.

    Args:
        bucket_numel: largest flat group; a larger unit is split when it is built.
        prefetch_numel: how far ahead of use units are gathered; 0 gathers nothing ahead.
        persistence_numel: smaller parameters stay gathered at stage 3.
        max_live_numel: gathering ahead stops at this many gathered elements.
        wire_dtype: dtype of gradients on the wire, None for the gradient buffer's own.
    """

    bucket_numel: int | None = None
    prefetch_numel: int | None = None
    persistence_numel: int | None = None
    max_live_numel: int | None = None
    wire_dtype: torch.dtype | None = None

    def resolved(self, units: Sequence[UnitSpec]) -> ZeroSizes:
        """Fill what is None: one unit ahead, and only norms and biases persistent, however small the model.

        DeepSpeed's fixed defaults (5e8, 5e7, 1e5) exceed a small model, which then takes more memory at stage 3 than
        at stage 2 (DeepSpeed#5305); they are the upper bounds here.
        """
        sizes = [sum(spec.parameter.numel() for spec in unit.parameters) for unit in units]
        largest = max([1, *sizes[1:]] if len(sizes) > 1 else [1, *sizes])
        return ZeroSizes(
            bucket_numel=_LARGEST_BUCKET if self.bucket_numel is None else max(1, self.bucket_numel),
            prefetch_numel=_first(self.prefetch_numel, min(_LARGEST_PREFETCH, largest)),
            persistence_numel=_first(self.persistence_numel, min(_LARGEST_PERSISTENT, largest // 64)),
            max_live_numel=_first(self.max_live_numel, _UNLIMITED),
            wire_dtype=self.wire_dtype,
        )


def _first(value: int | None, default: int) -> int:
    return default if value is None else value
