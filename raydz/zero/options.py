"""What the engine is told: sizes, whose defaults scale with the model, and how gradients are added up.

Neighbours: `engine.py` makes one of its configuration; `sharded.py` and `schedule.py` obey it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raydz.config import EngineConfig
from raydz.zero.precision import DTYPES
from raydz.zero.units import UnitSpec

_LARGEST_BUCKET = 500_000_000
_LARGEST_HOSTED_BUCKET = 50_000_000
"""Where gradients leave and weights return a flat group at a time, beside what computes: small parts wait less."""
_LARGEST_PREFETCH = 50_000_000
_LARGEST_PERSISTENT = 100_000
_UNLIMITED = 1_000_000_000


@dataclass(frozen=True)
class ZeroSizes:
    """The sizes of `ZeroOptions` with nothing left open."""

    bucket_numel: int
    prefetch_numel: int
    persistence_numel: int
    max_persistent_numel: int
    max_live_numel: int
    reuse_numel: int


@dataclass(frozen=True)
class ReduceOptions:
    """How gradients are added up over ranks and micro-batches.

    Args:
        wire_dtype: what travels, None for the gradient buffer's own.
        predivide_factor: gradients are divided by it before they travel and by the rest of the ranks' number after;
            None: all of that comes before.
        by_all_reduce: every rank receives the whole sum, though it keeps its shard alone.
        accumulation_dtype: of the buffers in which micro-batches add up.
    """

    wire_dtype: torch.dtype | None = None
    predivide_factor: float | None = None
    by_all_reduce: bool = False
    accumulation_dtype: torch.dtype = torch.float32

    @classmethod
    def from_config(cls, config: EngineConfig) -> ReduceOptions:
        """What the configuration says about the way of a gradient."""
        wire, factor = config.communication_data_type, config.gradient_predivide_factor
        return cls(
            wire_dtype=None if wire is None else DTYPES[wire],
            predivide_factor=None if config.prescale_gradients or factor == 1 else factor,
            by_all_reduce=not config.zero_optimization.reduce_scatter,
            accumulation_dtype=DTYPES[config.accumulation_dtype],
        )


@dataclass(frozen=True)
class Int8Options:
    """What travels as int8 blocks, of all that is large and no exception in precision; see "ZeRO++" in README.md.

    Args:
        weights: trained and frozen ones.
        frozen: frozen ones.
    """

    weights: bool = False
    frozen: bool = False
    gradients: bool = False


@dataclass(frozen=True)
class ZeroOptions:
    """Element counts; None is scaled with the model by `resolved`.

    Args:
        bucket_numel: largest flat group; a larger unit is split when it is built.
        prefetch_numel: how far ahead of use units are gathered; 0 gathers nothing ahead.
        persistence_numel: smaller parameters stay gathered at stage 3.
        max_persistent_numel: most elements that stay so; a parameter that would cross it does not, later ones may.
        max_live_numel: gathering ahead stops at this many gathered elements.
        reuse_numel: a unit is kept after its forward if at most so many elements of others come before its next use.
        update_numel: elements that the optimizer updates at once.
        overlaps: False awaits every gather and reduction where it is launched, and gathers nothing ahead.
        refuses_unused: a backward that leaves a parameter without a gradient is an error.
    """

    bucket_numel: int | None = None
    prefetch_numel: int | None = None
    persistence_numel: int | None = None
    max_persistent_numel: int = sys.maxsize
    max_live_numel: int | None = None
    reuse_numel: int | None = None
    update_numel: int = _UNLIMITED
    overlaps: bool = True
    refuses_unused: bool = False
    reduction: ReduceOptions = ReduceOptions()
    int8: Int8Options = Int8Options()

    @classmethod
    def from_config(cls, config: EngineConfig) -> ZeroOptions:
        """What `zero_optimization` and the keys about gradients say."""
        zero = config.zero_optimization
        sizes = [size for size in (zero.reduce_bucket_size, zero.allgather_bucket_size) if size is not None]
        is_hosted = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
        if not sizes and is_hosted:
            sizes = [_LARGEST_HOSTED_BUCKET]
        return cls(
            bucket_numel=min(sizes) if sizes else None,
            prefetch_numel=zero.stage3_prefetch_bucket_size,
            persistence_numel=zero.stage3_param_persistence_threshold,
            max_persistent_numel=zero.stage3_model_persistence_threshold,
            max_live_numel=zero.stage3_max_live_parameters,
            reuse_numel=zero.stage3_max_reuse_distance,
            update_numel=zero.sub_group_size,
            overlaps=zero.overlap_comm is not False,
            refuses_unused=not zero.ignore_unused_parameters,
            reduction=ReduceOptions.from_config(config),
            int8=Int8Options(
                weights=zero.zero_quantized_weights,
                frozen=zero.zero_quantized_nontrainable_weights,
                gradients=zero.zero_quantized_gradients,
            ),
        )

    def resolved(self, units: Sequence[UnitSpec]) -> ZeroSizes:
        """Fill what is None: one unit ahead, and only norms and biases persistent, however small the model.

        DeepSpeed's fixed defaults (5e8, 5e7, 1e5) exceed a small model, which then takes more memory at stage 3 than
        at stage 2 (DeepSpeed#5305); they are the upper bounds here. Its reuse distance of 1e9 keeps a whole model of
        half as many elements; here a unit is kept for what is used next alone.
        """
        sizes = [sum(spec.parameter.numel() for spec in unit.parameters) for unit in units]
        largest = max([1, *sizes[1:]] if len(sizes) > 1 else [1, *sizes])
        return ZeroSizes(
            bucket_numel=_LARGEST_BUCKET if self.bucket_numel is None else max(1, self.bucket_numel),
            prefetch_numel=_first(self.prefetch_numel, min(_LARGEST_PREFETCH, largest)) if self.overlaps else 0,
            persistence_numel=_first(self.persistence_numel, min(_LARGEST_PERSISTENT, largest // 64)),
            max_persistent_numel=self.max_persistent_numel,
            max_live_numel=_first(self.max_live_numel, _UNLIMITED),
            reuse_numel=_first(self.reuse_numel, 0),
        )


def _first(value: int | None, default: int) -> int:
    return default if value is None else value
